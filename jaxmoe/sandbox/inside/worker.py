# SPDX-License-Identifier: Apache-2.0
"""The process inside a sandbox: one JSON line per call comes in, one goes out.

Variables stay from call to call. What this process reports proves nothing: a program can change
all of it. Next: jaxmoe/sandbox/process.py is the other side.
"""

import ast
import io
import json
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from jaxmoe.sandbox.inside.landlock import restrict_files
from jaxmoe.sandbox.inside.limits import (
    die_with_parent,
    drop_privileges,
    limit_files,
    set_limits,
)
from jaxmoe.sandbox.inside.plain_data import (
    NestedTooDeep,
    NotPlainData,
    decode_value,
    encode_value,
)
from jaxmoe.sandbox.inside.seccomp import GROUPS, install_filter

FILE_NAME = "<python>"


class BoundedText(io.StringIO):
    """The first `limit` characters of what is written to it."""

    def __init__(self, limit: int) -> None:
        super().__init__(newline="")
        self._n_left = limit
        self.is_cut = False

    def write(self, text: str) -> int:
        if self._n_left >= len(text):
            self._n_left -= len(text)
            return super().write(text)
        super().write(text[: self._n_left])
        self._n_left, self.is_cut = 0, True
        return len(text)

    def read_all(self) -> str:
        return self.getvalue() + ("\n[output was cut here]" if self.is_cut else "")


def main(setup: dict[str, Any]) -> None:
    """Give up what the sandbox forbids, then answer requests until the pipe ends."""
    requests, replies = _move_pipes()
    try:
        _give_up_rights(setup)
    except Exception as error:  # the standard streams lead nowhere
        _write_line(replies, {"problem": f"{type(error).__name__}: {error}"})
        return
    _answer_requests(setup, requests, replies)


def _give_up_rights(setup: dict[str, Any]) -> None:
    removed = frozenset(setup["removed"])
    if setup["kind"] == "bubblewrap" and setup["disk_mb"] and "files" not in removed:
        limit_files(os.getcwd())
    if setup["kind"] != "unsafe_local" and "capabilities" not in removed:
        drop_privileges()
    die_with_parent(setup["parent"])
    # The kernel counts the tasks of a sandbox only in a user namespace, and not those of root.
    # Where it does not, threads are refused.
    counted = set() if setup["counts_tasks"] else {"tasks"}
    set_limits(setup["memory_mb"], setup["disk_mb"], removed | counted)
    if setup["kind"] == "landlock" and "landlock" not in removed:
        restrict_files(setup["readable"])
    if setup["kind"] != "unsafe_local":
        # A mount namespace has only files of the program, whose attributes and links are its own.
        allowed = {"attributes", "links"} if setup["kind"] == "bubblewrap" else set()
        allowed |= {"threads"} if setup["counts_tasks"] else set()
        install_filter(frozenset(GROUPS) - allowed - removed)


def _answer_requests(setup: dict[str, Any], requests: Any, replies: int) -> None:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    for name in [name for name in sys.modules if name.startswith("jaxmoe")]:
        del sys.modules[name]
    sys.argv = [""]
    _write_line(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        if name := request.get("module"):
            module.__name__ = name
            sys.modules[name] = module  # pickle and typing look up classes there
        report = {"id": request["id"]} | _answer_request(
            request, module.__dict__, setup["max_chars"], requests, replies
        )
        _write_line(replies, report)


def _move_pipes() -> tuple[Any, int]:
    """Move the pipes away from descriptors 0 to 2, so that C code cannot write into a reply."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    return requests, replies


def _write_line(descriptor: int, record: dict[str, Any]) -> None:
    content = memoryview(json.dumps(record).encode() + b"\n")
    while content:
        content = content[os.write(descriptor, content) :]


def _answer_request(
    request: dict[str, Any], namespace: dict[str, Any], max_chars: int, requests: Any, replies: int
) -> dict[str, Any]:
    output = BoundedText(max_chars)
    saved = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = output
    value: Any = None
    error = ""
    try:
        for name in request.get("outside", ()):
            namespace[name] = _make_outside_function(name, request["id"], requests, replies)
        if "call" in request:
            value = _call_function(request["call"], namespace)
        else:
            _run_program(request["code"], namespace)
    except BaseException as raised:  # SystemExit must not end this process
        error = _describe_error(raised, output)
    finally:
        sys.stdout, sys.stderr = saved
    report: dict[str, Any] = {"output": output.read_all(), "error": error}
    return report | ({"value": value} if "call" in request and not error else {})


def _run_program(code: str, namespace: dict[str, Any]) -> None:
    """Run a program, and print the value of its last expression."""
    lines = code.splitlines(keepends=True)
    linecache.cache[FILE_NAME] = (len(code), None, lines, FILE_NAME)  # for tracebacks
    tree = ast.parse(code, FILE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE_NAME, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), FILE_NAME, "eval"), namespace)
        if value is not None:
            print(repr(value))


def _call_function(call: dict[str, Any], namespace: dict[str, Any]) -> Any:
    function = namespace.get(call["name"])
    if not callable(function):
        raise NameError(f"name {call['name']!r} is not defined as a function")
    arguments = [decode_value(form) for form in call["arguments"]]
    named = {name: decode_value(form) for name, form in call["named"].items()}
    return encode_value(function(*arguments, **named))


def _make_outside_function(
    name: str, request_id: str, requests: Any, replies: int
) -> Callable[..., Any]:
    """A function whose calls are answered by the process outside."""

    def call_outside(*arguments: Any, **named: Any) -> Any:
        try:
            call = {
                "name": name,
                "arguments": [encode_value(x) for x in arguments],
                "named": {key: encode_value(x) for key, x in named.items()},
            }
        except NestedTooDeep as error:
            # A value from outside may be a part of it; what no value changes is NotPlainData.
            raise RecursionError(str(error)) from error
        _write_line(replies, {"id": request_id, "outside": call})
        answer = json.loads(requests.readline())
        if answer["error"]:
            kind = getattr(__import__("builtins"), answer["error"], RuntimeError)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            # These end a loop without a word, as they would the `map` or `zip` of a test.
            ends_loop = is_error and issubclass(kind, StopIteration | StopAsyncIteration)
            raise (kind if is_error and not ends_loop else RuntimeError)(answer["error"])
        return decode_value(answer["value"])

    return call_outside


def _describe_error(raised: BaseException, output: BoundedText) -> str:
    """Print the traceback of a program without this module's frames; return the error's name."""
    name = "NotPlainData" if isinstance(raised, NotPlainData) else type(raised).__name__
    try:
        frame = raised.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != FILE_NAME:
            frame = frame.tb_next
        lines = traceback.format_exception(type(raised), raised, frame, limit=-5)
        output.write("".join(lines).rstrip("\n")[-2000:])
    except BaseException:  # an error whose text raises, or no memory
        output.write(name)
    return name
