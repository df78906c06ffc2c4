# SPDX-License-Identifier: Apache-2.0
"""Programs in a sandbox: state, values, limits; and what becomes of those that misbehave."""

import os
import time
from pathlib import Path

import pytest

from jaxmoe.sandbox import interpreter
from jaxmoe.sandbox.inside.plain_data import NotPlainData
from jaxmoe.sandbox.interpreter import find_interpreter, list_readable_paths
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.process import MAX_OUTPUT_CHARS, CallStatus
from tests.jaxmoe.sandbox.kinds import (
    CONFIG,
    KINDS,
    end_from_outside,
    find_problem,
    first_kind,
    open_sandbox,
    require_kind,
)

FIND_PIPE = """
import json, os, sys
frame = sys._getframe()
while frame.f_back and "replies" not in frame.f_locals:
    frame = frame.f_back
pipe = frame.f_locals["replies"]
"""


@pytest.fixture(params=KINDS)
def sandbox(request):
    require_kind(request.param)
    with open_sandbox(request.param) as sandbox:
        yield sandbox


def test_variables_persist_and_the_last_value_is_printed(sandbox):
    assert sandbox.run("import math\nx = 6", 5.0).output == ""
    assert sandbox.run("print('a')\nx * 7", 5.0).output == "a\n42\n"
    assert sandbox.run("def f(n):\n    return math.factorial(n)\nf(5)", 5.0).output == "120\n"
    assert sandbox.run("None", 5.0).output == ""


def test_errors_show_program_lines_and_preserve_variables(sandbox):
    result = sandbox.run("x = 5\ndef f():\n    return 1 / 0\nf()", 5.0)
    assert result.status is CallStatus.ERROR and result.error == "ZeroDivisionError"
    assert "return 1 / 0" in result.output and "worker" not in result.output
    assert sandbox.run("x", 5.0).output == "5\n"
    assert sandbox.run("import sys; sys.exit(3)", 5.0).error == "SystemExit"
    assert "SyntaxError" in sandbox.run("1 +", 5.0).output
    assert sandbox.run("x", 5.0).output == "5\n"


def test_asyncio_dataclasses_and_the_standard_library_work(sandbox):
    code = """
import asyncio, collections, dataclasses, decimal, fractions, itertools, json, re, statistics
@dataclasses.dataclass
class Point:
    x: "int" = 3
async def wait():
    await asyncio.sleep(0.001)
    return Point().x
asyncio.run(wait()), str(decimal.Decimal(1) / 3)[:5], fractions.Fraction(1, 3)
"""
    assert sandbox.run(code, 5.0).output == "(3, '0.333', Fraction(1, 3))\n"


def test_functions_return_plain_data_and_nothing_else(sandbox):
    sandbox.run("def f(*args, **named): return args, named", 5.0)
    values = [1, -(2**70), 1.5, True, None, "é\ud800", b"\0", (1, [2]), {3}, {(1,): {"a": 2j}}]
    result = sandbox.call("f", values, 5.0, {"k": float("inf")})
    value = result.value.decode()
    assert value == (tuple(values), {"k": float("inf")})
    assert [type(x) for x in value[0]] == [type(x) for x in values]
    sandbox.run(
        "class Yes(int):\n    def __eq__(self, other): return True\ndef g(): return Yes(3)", 5.0
    )
    assert type(sandbox.call("g", [], 5.0).value.decode()) is int
    sandbox.run("def h(): return object()", 5.0)
    assert sandbox.call("h", [], 5.0).error == "NotPlainData"
    assert sandbox.call("missing", [], 5.0).error == "NameError"
    with pytest.raises(NotPlainData):
        sandbox.call("f", [object()], 5.0)


def test_programs_may_call_the_trainers_given_functions(sandbox):
    answers = {"double": lambda name, arguments, named: 2 * arguments[0].decode()}
    assert sandbox.run("double(21)", 5.0, answers).output == "42\n"
    # Without them, the same line on the pipe is a forgery.
    assert sandbox.run("double(21)", 5.0).status is CallStatus.FORGED


def test_a_program_is_main_unless_it_is_named(sandbox):
    guarded = "if __name__ == '__main__':\n    print('main')\n__name__"
    assert sandbox.run(guarded, 5.0).output == "main\n'__main__'\n"
    assert sandbox.run(guarded, 5.0, module="solution").output == "'solution'\n"
    assert sandbox.run(guarded, 5.0).output == "'solution'\n"
    assert sandbox.run("import solution\nsolution.__dict__ is globals()", 5.0).output == "True\n"


def test_a_sandbox_killed_between_calls_is_lost(sandbox):
    assert sandbox.run("x = 1", 5.0).status is CallStatus.OK
    end_from_outside(sandbox)
    result = sandbox.run("x", 5.0)
    assert result.status is CallStatus.CRASHED and result.is_lost and result.error == "SIGKILL"
    assert not sandbox.run("x", 5.0).is_lost  # it was ended from here


def test_a_sandbox_killed_before_use_is_lost(sandbox):
    end_from_outside(sandbox)
    assert sandbox.run("1", 5.0).is_lost


LATER_ENDS = {
    "exit after the reply": "def write(*arguments):\n    first(*arguments)\n    os._exit(137)\n"
    "first, os.write = os.write, write",
    "signal after the reply": "def write(*arguments):\n    first(*arguments)\n"
    "    os.kill(os.getpid(), 9)\n    os._exit(137)\nfirst, os.write = os.write, write",
    "alarm": "signal.signal(signal.SIGALRM, lambda *_: os._exit(137))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.002)",
    "alarm without a handler": "signal.setitimer(signal.ITIMER_REAL, 0.002)",
    "in the call": "os._exit(137)",
}


@pytest.mark.parametrize("name", LATER_ENDS)
def test_a_program_cannot_lose_its_sandbox(sandbox, name):
    sandbox.run("import os, signal\n" + LATER_ENDS[name], 5.0)
    time.sleep(0.05)
    result = sandbox.run("import time; time.sleep(0.01)", 5.0)
    assert not result.is_lost


def test_output_is_cut(sandbox):
    start = time.monotonic()
    result = sandbox.run("for _ in range(300): print('x' * (1 << 20))", 20.0)
    assert result.status is CallStatus.OK and time.monotonic() - start < 15
    assert MAX_OUTPUT_CHARS < len(result.output) < MAX_OUTPUT_CHARS + 100
    assert sandbox.run("import os; os.write(1, b'junk')", 5.0).output == "4\n"


LATE = {
    "loop": "while True: pass",
    "loop that catches everything": """
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "alarm ignored": "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile 1: pass",
    "signals blocked": "import signal; signal.pthread_sigmask(0, range(1, 65))\nwhile 1: pass",
    "in C": "10 ** 10 ** 9",
    "sleep": "import time; time.sleep(1000)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile 1: pass",
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_call_is_killed_in_time(name):
    with open_sandbox() as sandbox:
        start = time.monotonic()
        assert sandbox.run(LATE[name], 0.3).status is CallStatus.TIMEOUT
        assert time.monotonic() - start < 3 and not sandbox.is_running
        assert sandbox.run("1", 5.0).status is CallStatus.CRASHED


FORGERIES = {
    "junk without an end": "os.write(pipe, b'x' * 1000)",
    "a line of junk": "os.write(pipe, b'{}\\n')",
    "a line that is no JSON": "os.write(pipe, b'[' * 60000 + b'\\n')",
    "a reply to another request": """
os.write(pipe, json.dumps({"id": "0" * 16, "output": "FORGED", "error": ""}).encode() + b"\\n")
""",
    "a reply of another form": """
os.write(pipe, json.dumps({"id": frame.f_locals["request"]["id"], "output": 3}).encode() + b"\\n")
""",
    "a value that is none": """
os.write(pipe, json.dumps({"id": frame.f_locals["request"]["id"], "output": "", "error": "",
    "value": {"list": 3}}).encode() + b"\\n")
""",
    "every descriptor": """
for descriptor in range(64):
    try: os.write(descriptor, b'{"id": "x"}\\n')
    except OSError: pass
""",
    "much junk": "for _ in range(200): os.write(pipe, b'x' * 65536)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_junk_and_forged_lines_cost_milliseconds(name):
    with open_sandbox() as sandbox:
        start = time.monotonic()
        assert sandbox.run(FIND_PIPE + FORGERIES[name], 60.0).status is CallStatus.FORGED
        assert time.monotonic() - start < 10 and not sandbox.is_running


def test_an_endless_line_is_read_to_its_limit():
    endless = "for _ in range(140): os.write(pipe, b'x' * 65536)\nimport time; time.sleep(1000)"
    with open_sandbox() as sandbox:
        assert sandbox.run(FIND_PIPE + endless, 10.0).status is CallStatus.FORGED


def test_a_line_after_the_reply_ends_the_sandbox():
    second = """
line = json.dumps({"id": frame.f_locals["request"]["id"], "output": "first", "error": ""})
os.write(pipe, (line + "\\n").encode() * 2)
"""
    with open_sandbox() as sandbox:
        # A reply whose id was read from memory is taken: what a sandbox reports proves nothing.
        assert sandbox.run(FIND_PIPE + second, 5.0).output == "first"
        deadline = time.monotonic() + 5
        while not sandbox._has_unread_bytes() and not sandbox._buffer:
            assert time.monotonic() < deadline
        assert sandbox.run("1", 60.0).status is CallStatus.FORGED


ENDINGS = {
    "exit": "import os; os._exit(7)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "closed descriptors": "import os; os.closerange(0, 64)",
    "stack": "import sys, threading\nsys.setrecursionlimit(10**8)\n"
    "class A:\n    def __getattr__(self, name): return getattr(self, name)\nA().x",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_interpreters_end_is_noticed_immediately(name):
    with open_sandbox() as sandbox:
        start = time.monotonic()
        result = sandbox.run(ENDINGS[name], 60.0)
        assert result.status in (CallStatus.CRASHED, CallStatus.ERROR)
        assert time.monotonic() - start < 10
        assert name == "stack" or (result.status is CallStatus.CRASHED and result.error)
        assert name != "exit" or result.error == "exit status 7"


def test_threads_left_behind_end_the_sandbox():
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(50,)).start()\n'out'"
    # Root may have no threads at all in bubblewrap, so the measure is taken out.
    require_kind("bubblewrap")
    with open_sandbox("bubblewrap", removed=["threads"]) as sandbox:
        start = time.monotonic()
        result = sandbox.run(code, 30.0)
        assert result.status is CallStatus.UNFINISHED_TASKS and result.output == "'out'\n"
        assert time.monotonic() - start < 5 and not sandbox.is_running
    joined = "import concurrent.futures as c\nwith c.ThreadPoolExecutor(4) as p:\n"
    joined += "    x = list(p.map(abs, [-1, 2]))\nx"
    with open_sandbox("bubblewrap", removed=["threads"]) as sandbox:
        assert sandbox.run(joined, 5.0).output == "[1, 2]\n"
        assert sandbox.run("1", 5.0).output == "1\n"


def test_a_too_long_request_does_not_end_sandboxes():
    with open_sandbox() as sandbox:
        assert "1,000,000" in sandbox.run("#" * 1_000_001, 5.0).error
        assert sandbox.run("f = len", 5.0).output == ""
        assert sandbox.call("f", ["x" * 2_000_000], 5.0).value.decode() == 2_000_000


def test_calls_work_with_descriptors_beyond_selects_limit():
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(1)]
    try:
        high = os.dup2(fillers[0], 1500) if _can_open(1600) else None
        if high is None:
            pytest.skip("this process may not have 1,600 descriptors (ulimit -n)")
        fillers += [high, *(os.dup(fillers[0]) for _ in range(1100))]
        with open_sandbox() as sandbox:
            assert sandbox._replies > 1024
            assert sandbox.run("6 * 7", 5.0).output == "42\n"
    finally:
        for descriptor in fillers:
            os.close(descriptor)


def _can_open(count):
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= count


def test_a_programs_files_persist_in_its_sandbox_only():
    require_kind("bubblewrap")
    with open_sandbox("bubblewrap") as first, open_sandbox("bubblewrap") as second:
        assert first.run("open('a', 'w').write('text')", 5.0).output == "4\n"
        assert first.run("open('/tmp/a').read()", 5.0).output == "'text'\n"
        assert second.run("open('a')", 5.0).error == "FileNotFoundError"


def test_a_timer_burns_no_processor_between_calls(sandbox):
    burn = "def burn(*_):\n    while True: pass\nsignal.signal(signal.SIGALRM, burn)\n"
    timer = "signal.setitimer(signal.ITIMER_REAL, 0.01)"
    assert sandbox.run(f"import signal\n{burn}{timer}", 5.0).status is CallStatus.OK
    before = sandbox.read_cpu_s()
    time.sleep(0.3)
    assert sandbox.read_cpu_s() - before < 0.1
    assert sandbox.run("1", 0.3).status is CallStatus.TIMEOUT


def test_cpu_time_is_read_from_outside(sandbox):
    before = sandbox.read_cpu_s()
    sandbox.run(
        "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: 0", 9.0
    )
    assert 0.15 < sandbox.read_cpu_s() - before < 2


def sandbox_prefix():
    return Launcher("bubblewrap", CONFIG).interpreter.prefix


def test_the_command_line_says_nothing_of_this_machine():
    require_kind("bubblewrap")
    with open_sandbox("bubblewrap") as sandbox:
        command = Path(f"/proc/{sandbox._child.pid}/cmdline").read_text()
        assert "bwrap" in command and "--ro-bind" not in command
        assert str(sandbox_prefix()) not in command
    assert find_problem("bubblewrap") == ""
    assert Launcher(first_kind(), CONFIG)._environment() == {}


def test_a_time_limit_beyond_polls_range_works():
    with open_sandbox() as sandbox:
        assert sandbox.run("6 * 7", 1e9).output == "42\n"


@pytest.mark.parametrize("kind", KINDS)
def test_packages_in_system_library_folders_are_hidden(kind, tmp_path, monkeypatch):
    """Where libraries have no folder of their own, the packages of a system's Python lie in it."""
    packages = tmp_path / "lib" / "python3.9" / "site-packages"
    packages.mkdir(parents=True)
    for file in (packages / "answers.py", tmp_path / "lib" / "library.so"):
        file.write_text("x")
    folders = (*interpreter._LIBRARY_FOLDERS, str(tmp_path / "lib"))
    monkeypatch.setattr(interpreter, "_LIBRARY_FOLDERS", folders)
    if kind == "landlock":
        paths = list_readable_paths(find_interpreter())
        assert str(tmp_path / "lib" / "library.so") in paths
        assert not {str(path) for path in (packages, *packages.parents)} & set(paths)
        return
    require_kind(kind)
    with open_sandbox(kind, disk_mb=0) as sandbox:  # its files would hide the folder
        assert sandbox.run(f"open('{tmp_path}/lib/library.so').read()", 5.0).output == "'x'\n"
        assert sandbox.run(f"import os\nos.listdir('{packages}')", 5.0).output == "[]\n"
