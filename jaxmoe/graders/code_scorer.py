# SPDX-License-Identifier: Apache-2.0
"""The reward of code: 1 if it passes the tests of its row, in sandboxes that nothing ran in before.

`data.rewards=jaxmoe.graders.code_scorer:score_code` for rows with the columns `test` and
`entry_point`, and `prompt` if helpers are defined there. Next: jaxmoe/graders/grading.py.
"""

import ast
import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.data.rows import Row
from jaxmoe.graders.code_blocks import list_code_blocks
from jaxmoe.graders.code_tests import find_test_fault
from jaxmoe.graders.grading import Grade, GradeStatus, grade_code
from jaxmoe.graders.suspicious_code import KINDS, find_suspicious_code, parse_code
from jaxmoe.rewards.reward_specs import checked_by
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.probe import choose_sandbox
from jaxmoe.sandbox.process import SandboxError

_MAX_BLOCKS = 16  # blocks of a response that are tried, from the last
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COUNTED = [status for status in GradeStatus if status is not GradeStatus.PASSED]
_PARTS = ("no_code", "no_sandbox", *(status.value for status in _COUNTED))


def check_tests(rows: Sequence[Row], *, timeout_s: Any = 10.0, **_options: Any) -> None:
    """Raise ConfigError for tests or a time in which no answer can pass, or none can fail."""
    if type(timeout_s) not in (int, float) or not 0.0 < timeout_s < 1e6:
        raise ConfigError(
            f"score_code(timeout_s=…) must be a number of seconds above 0, got {timeout_s!r}. "
            "Try timeout_s=10."
        )
    for number, row in enumerate(rows):
        try:
            tests, entry_point = read_tests(row.columns)
            if fault := find_test_fault(tests, entry_point, _read_setup(row.columns)):
                raise ConfigError(f"score_code's {fault}, or drop the row.")
        except ConfigError as error:
            raise ConfigError(f"{row.location or f'row {number}'}: {error}") from error


def read_tests(columns: Mapping[str, Any]) -> tuple[str, str]:
    """The tests of a row, and the name of the function that they call. Raises ConfigError."""
    tests, entry_point = columns.get("test"), columns.get("entry_point")
    if not isinstance(tests, str) or not isinstance(entry_point, str):
        raise ConfigError(
            "score_code needs rows with the texts test and entry_point, such as HumanEval's; got "
            f"the columns {', '.join(columns) or 'none'}. Rename columns, or use another reward."
        )
    return tests, entry_point


def _read_setup(columns: Mapping[str, Any]) -> str:
    """The prompt of a row if it is a program, which both the code and the tests may need."""
    prompt = columns.get("prompt")
    return prompt if isinstance(prompt, str) and parse_code(prompt) is not None else ""


@checked_by(check_tests)
async def score_code(
    prompt: Any,
    response: str,
    row: Mapping[str, Any],
    *,
    timeout_s: float = 10.0,
    sandbox: Mapping[str, Any] | None = None,
) -> Mapping[str, float | None]:
    """1.0 if the function that the row asks for passes the row's tests, else 0.0.

    The code is the response's last block in ``` that defines the function, or all of it; a response
    that continues the prompt's function is read behind the prompt. Each way to fail is counted by
    name, and so are signs of cheating in its text (`hack/KIND`), which cost nothing. If a sandbox
    does not start or is killed, or the row's tests fail every answer, the score is None: the answer
    has no reward.

    timeout_s: for one answer, all tests together.
    sandbox: fields of SandboxConfig; a run passes those of its config.
    Raises: ConfigError for a row without tests, and without `sandbox` if none starts here.
    """
    tests, entry_point = read_tests(row)
    setup = _read_setup(row)
    code = extract_code(response, entry_point, str(row.get("prompt") or ""))
    if code is None:
        no_signs = {f"hack/{kind}": 0.0 for kind in KINDS}
        return _count_grade(Grade(GradeStatus.RAISED, "SyntaxError"), has_code=False) | no_signs
    signs = find_signs(code, setup)
    try:
        pool = open_pool_of_run(sandbox)
        # In threads: a grade waits for other processes.
        grade = await asyncio.to_thread(
            grade_code, pool, code, entry_point, tests, setup=setup, timeout_s=timeout_s
        )
    except SandboxError:
        return {**dict.fromkeys(_PARTS, 0.0), "score": None, "no_sandbox": 1.0} | signs
    return _count_grade(grade) | signs


def find_signs(code: str, setup: str) -> dict[str, float]:
    """hack/KIND: 1.0 if a program does that more often than the code of its prompt."""
    after, before = (
        find_suspicious_code(parse_code(text) or ast.Module([], [])) for text in (code, setup)
    )
    repeats = all(line.strip() in code for line in setup.splitlines())
    return {f"hack/{kind}": float(after[kind] > repeats * before[kind]) for kind in KINDS}


def extract_code(response: str, entry_point: str, prompt: str = "") -> str | None:
    """The program of a response that defines a function; None if no part of it does.

    Tried in this order: the blocks in ``` from the last one, the text, each of them behind the
    prompt.
    """
    texts = [*reversed(list_code_blocks(response)[-_MAX_BLOCKS:]), response]
    for text in (*texts, *(prompt + text for text in texts), *(prompt + "\n" + t for t in texts)):
        tree = parse_code(text)
        if tree is not None and _defines_name(tree, entry_point):
            return text
    return None


def _defines_name(tree: ast.Module, name: str) -> bool:
    for node in _list_statements(tree):
        if isinstance(node, _DEFINITIONS) and node.name == name:
            return True
        if isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x for target in targets for x in ast.walk(target)]
            if any(isinstance(x, ast.Name) and x.id == name and _is_set(x) for x in names):
                return True
        if isinstance(node, ast.ImportFrom | ast.Import) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return True
    return False


def _is_set(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _list_statements(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module, with those below `if`, `try`, `with` and loops."""
    statements, stack = list[ast.stmt](), [*tree.body]
    while stack:
        node = stack.pop()
        statements.append(node)
        if not isinstance(node, _DEFINITIONS):
            children = [*ast.iter_child_nodes(node)]
            handlers = [x for x in children if isinstance(x, ast.ExceptHandler)]
            stack += [x for x in children if isinstance(x, ast.stmt)]
            stack += [x for handler in handlers for x in handler.body]
    return statements


def _count_grade(grade: Grade, has_code: bool = True) -> dict[str, float | None]:
    ending = grade.status.value if has_code else "no_code"
    score = None if grade.is_rows_fault else float(grade.status is GradeStatus.PASSED)
    return {"score": score} | {name: float(name == ending) for name in _PARTS}


def open_pool_of_run(fields: Mapping[str, Any] | None) -> SandboxPool:
    """The pool of this process for a config's fields; an answer need not wait for a start.

    fields: of SandboxConfig, by a run; None for a caller that has no run.
    Raises: ConfigError for wrong fields, and without any if no sandbox starts. SandboxError in a
        run, where one started before: then the machine is at fault, for now.
    """
    config = SandboxConfig(**(fields or {}))
    try:
        return _open_pool(config)
    except ConfigError as error:
        if fields is None:
            raise
        raise SandboxError(str(error)) from error


@functools.lru_cache(maxsize=2)
def _open_pool(config: SandboxConfig) -> SandboxPool:
    return SandboxPool(choose_sandbox(config), config.warm)
