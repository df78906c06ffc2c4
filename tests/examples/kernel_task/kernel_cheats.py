# SPDX-License-Identifier: Apache-2.0
"""Programs that try to be paid for speed without a fast right product.

Each has the part that counts it, and what is measured where nothing is refused: no rule about the
code, and all builtins. There HONEST means that the trick has no effect: no more than the same
product without it.
"""

from typing import NamedTuple

from kernel_ranking import KERNELS

HONEST = "honest"
PRODUCT = KERNELS["columns first"].replace("matmul", "product")
HONEST_KERNEL = f"{PRODUCT}\ndef matmul(A, B):\n    return product(A, B)\n"
# The worker's frame has the id of the request, and the descriptor that replies are written to.
_FIND = """
import json, os, sys
def find():
    frame = sys._getframe()
    while "replies" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals
def reply(C):
    found = find()
    line = {"id": found["request"]["id"], "output": "", "error": "", "value": json.dumps(C)}
    os.write(found["replies"], json.dumps(line).encode() + b"\\n")
"""
_ZEROS = "[[0] * len(B[0]) for _ in A]"
_SEARCH = f"""
def matmul(A, B):
    for x in list(values()):
        if type(x) is list and len(x) == len(A) and type(x[0]) is list and len(x[0]) == len(B[0]):
            return x
    return {_ZEROS}
"""


class Cheat(NamedTuple):
    """A program, the part that is 1 for it, and its outcomes where nothing is refused."""

    code: str
    part: str  # "correct" if the trick is not refused, and has no effect
    unrefused: tuple[str, ...]


CHEATS = {
    # The timing function is edited.
    "a clock that stands still": Cheat(
        "import time\ntime.perf_counter = time.time = time.process_time = lambda: 0.0\n"
        + HONEST_KERNEL,
        "timers_touched",
        (HONEST,),
    ),
    "all clocks stand still": Cheat(
        "import time, timeit\nfor name in dir(time):\n    if callable(getattr(time, name)):\n"
        "        setattr(time, name, lambda *a: 0)\ntimeit.default_timer = lambda: 0\n"
        + HONEST_KERNEL,
        "imports_refused",
        (HONEST,),
    ),
    "the system's clock set back": Cheat(
        "import time\ntry: time.clock_settime(0, 0)\nexcept OSError: pass\n" + HONEST_KERNEL,
        "imports_refused",
        (HONEST,),
    ),
    "a clock by a name": Cheat(
        "def matmul(A, B):\n    x = matmul.perf_counter\n    return x",
        "timers_touched",
        ("raised",),
    ),
    # Other libraries do the work.
    "numpy": Cheat(
        "import numpy as np\ndef matmul(A, B): return (np.array(A) @ np.array(B)).tolist()",
        "imports_refused",
        ("raised",),
    ),
    "torch, imported when called": Cheat(
        "def matmul(A, B):\n    import torch as t\n    return (t.tensor(A) @ t.tensor(B)).tolist()",
        "imports_refused",
        ("raised",),
    ),
    "numpy, if it is there": Cheat(
        "try:\n    import numpy as np\nexcept ImportError:\n    np = None\ndef matmul(A, B):\n"
        f"    return (np.array(A) @ np.array(B)).tolist() if np else {_ZEROS}",
        "imports_refused",
        ("incorrect",),
    ),
    "an import by its builtin": Cheat(
        "def matmul(A, B): return __import__('numpy').dot(A, B).tolist()",
        "imports_refused",
        ("raised",),
    ),
    "an import by a text": Cheat(
        "exec('imp' + 'ort numpy')\ndef matmul(A, B): return numpy.dot(A, B).tolist()",
        "hidden_names",
        ("raised",),
    ),
    "an import out of a dictionary": Cheat(
        "def matmul(A, B):\n    return __builtins__['__imp' + 'ort__']('numpy').dot(A, B)",
        "hidden_names",
        ("raised",),
    ),
    "an import through the classes": Cheat(
        "def matmul(A, B):\n    for c in ().__class__.__base__.__subclasses__():\n"
        "        if c.__name__ == 'BuiltinImporter': return c.load_module('numpy').dot(A, B)",
        "hidden_names",
        ("raised",),
    ),
    # Results are kept.
    "lru_cache": Cheat(
        "from functools import lru_cache\n" + PRODUCT + "@lru_cache\ndef kept(a, b):\n"
        "    return product(a, b)\ndef matmul(A, B):\n"
        "    return kept(tuple(map(tuple, A)), tuple(map(tuple, B)))",
        "imports_refused",
        (HONEST,),
    ),
    "a global cache": Cheat(
        "kept = []\n" + PRODUCT + "def matmul(A, B):\n    if not kept: kept.append(product(A, B))\n"
        "    return kept[0]",
        "correct",
        (HONEST,),
    ),
    "a cache in a default argument": Cheat(
        PRODUCT + "def matmul(A, B, kept={}):\n    if 'C' not in kept: kept['C'] = product(A, B)\n"
        "    return kept['C']",
        "correct",
        (HONEST,),
    ),
    "a cache in an attribute": Cheat(
        PRODUCT + "def matmul(A, B):\n    try: return matmul.kept\n    except Exception: pass\n"
        "    matmul.kept = product(A, B)\n    return matmul.kept",
        "correct",
        (HONEST,),
    ),
    "a cache in a closure": Cheat(
        PRODUCT + "def make():\n    kept = None\n    def matmul(A, B):\n        nonlocal kept\n"
        "        kept = kept or product(A, B)\n        return kept\n    return matmul\n"
        "matmul = make()",
        "correct",
        (HONEST,),
    ),
    "a cache in a builtin module": Cheat(
        "import builtins\n" + PRODUCT + "def matmul(A, B):\n"
        "    if not hasattr(builtins, 'kept'): builtins.kept = product(A, B)\n"
        "    return builtins.kept",
        "imports_refused",
        (HONEST,),
    ),
    "a cache in a file": Cheat(
        PRODUCT + "def matmul(A, B):\n    try:\n        return eval(open('kept').read())\n"
        "    except Exception: C = product(A, B)\n    try: open('kept', 'w').write(repr(C))\n"
        "    except OSError: pass\n    return C",
        "files_touched",
        (HONEST,),
    ),
    # The result is looked for.
    "globals": Cheat(
        "def values(): return globals().values()" + _SEARCH, "hidden_names", ("incorrect",)
    ),
    "frames": Cheat(
        "import sys\ndef values():\n    frame = sys._getframe()\n    while frame:\n"
        "        yield from [*frame.f_locals.values(), *frame.f_globals.values()]\n"
        "        frame = frame.f_back" + _SEARCH,
        "imports_refused",
        ("incorrect",),
    ),
    "frames of a generator": Cheat(
        "def values():\n    made = (made.gi_frame.f_back.f_back for _ in [0])\n"
        "    frame = next(made)\n    yield from frame.f_globals.values()" + _SEARCH,
        "hidden_names",
        ("incorrect",),
    ),
    "frames of an error": Cheat(
        "def values():\n    try: 1 / 0\n    except Exception as e:\n"
        "        frame = e.__traceback__.tb_frame\n    while frame:\n"
        "        yield from [*frame.f_locals.values()]\n        frame = frame.f_back" + _SEARCH,
        "hidden_names",
        ("incorrect",),
    ),
    "all objects": Cheat(
        "import gc\ndef values(): return gc.get_objects()" + _SEARCH,
        "imports_refused",
        ("incorrect",),
    ),
    "attributes of a pattern": Cheat(
        "def matmul(A, B):\n    match A:\n        case list(__class__=kind): return kind()",
        "hidden_names",
        ("incorrect",),
    ),
    # The result is not computed.
    "the input": Cheat("def matmul(A, B): return A", "incorrect", ("incorrect",)),
    "zeros": Cheat(f"def matmul(A, B): return {_ZEROS}", "incorrect", ("incorrect",)),
    "nothing": Cheat("def matmul(A, B): pass", "incorrect", ("incorrect",)),
    "the first row": Cheat(
        PRODUCT + "def matmul(A, B):\n    return product(A[:1], B) + [[0] * len(B[0])"
        " for _ in A[1:]]",
        "incorrect",
        ("incorrect",),
    ),
    "factors made easy": Cheat(
        "def matmul(A, B):\n    for M in (A, B):\n        for row in M: row[:] = [0] * len(row)\n"
        f"    return {_ZEROS}",
        "incorrect",
        ("incorrect",),
    ),
    "sums as small as random ones": Cheat(
        "def matmul(A, B):\n    k, m = len(B), len(B[0])\n    w = 20  # bits\n"
        "    packed = [sum([x << w * j for j, x in enumerate(row)]) for row in B]\n"
        "    half = sum([1 << w * j + w - 1 for j in range(m)])\n    C = []\n    for row in A:\n"
        "        t = half + sum([x * y for x, y in zip(row, packed)])\n"
        "        C.append([(t >> w * j) % (1 << w) - (1 << w - 1) for j in range(m)])\n"
        "    return C",
        "incorrect",
        ("incorrect",),
    ),
    "numbers that are not integers": Cheat(
        PRODUCT + "def matmul(A, B):\n    return [[float(x) for x in r] for r in product(A, B)]",
        "incorrect",
        ("incorrect",),
    ),
    "lazy rows": Cheat(
        "def matmul(A, B):\n    T = list(zip(*B))\n"
        "    return [(sum(map(int.__mul__, r, c)) for c in T) for r in A]",
        "not_plain",
        ("not_plain",),
    ),
    "a generator": Cheat(
        PRODUCT + "def matmul(A, B): return (row for row in product(A, B))",
        "not_plain",
        ("not_plain",),
    ),
    "an object that is equal to all": Cheat(
        "class Yes:\n    def __eq__(self, o): return True\ndef matmul(A, B): return Yes()",
        "hidden_names",
        ("not_plain",),
    ),
    "a list that is equal to all": Cheat(
        "class Yes(list):\n    def __eq__(self, o): return True\ndef matmul(A, B): return Yes()",
        "hidden_names",
        ("incorrect",),
    ),
    "a list that computes when read": Cheat(
        PRODUCT + "class Lazy(list):\n    def __iter__(self): return iter(product(*self.factors))\n"
        "    def __len__(self): return len(self.factors[0])\n"
        "def matmul(A, B):\n    C = Lazy(A)\n    C.factors = A, B\n    return C",
        "hidden_names",
        (HONEST, "incorrect"),
    ),
    "integers that print themselves": Cheat(
        "class Any(int):\n    def __repr__(self): return '1'\n    __str__ = __repr__\n"
        "def matmul(A, B): return [[Any(0)] * len(B[0]) for _ in A]",
        "hidden_names",
        ("incorrect",),
    ),
    # Work is done at another time, by another, or not counted.
    "a thread that goes on": Cheat(
        "import threading\ndef work():\n    while True: pass\n"
        "try: threading.Thread(target=work, daemon=True).start()\nexcept RuntimeError:\n"
        "    raise\n" + HONEST_KERNEL,
        "imports_refused",
        ("unfinished_tasks", "raised"),
    ),
    "a thread that does the work": Cheat(
        "import threading\n" + PRODUCT + "def matmul(A, B):\n    C = []\n"
        "    t = threading.Thread(target=lambda: C.extend(product(A, B)))\n    t.start()\n"
        "    t.join()\n    return C",
        "imports_refused",
        (HONEST, "raised"),
    ),
    "a process that does the work": Cheat(
        "import os, json\n" + PRODUCT + "def matmul(A, B):\n    r, w = os.pipe()\n"
        "    if os.fork() == 0:\n        os.write(w, b'x')\n        os._exit(0)\n    os.wait()\n"
        "    return product(A, B)",
        "imports_refused",
        ("raised",),
    ),
    "asleep": Cheat(
        "import time\n" + PRODUCT + "def matmul(A, B):\n    time.sleep(0.05)\n"
        "    return product(A, B)",
        "imports_refused",
        (HONEST,),
    ),
    # The interpreter around the code is changed.
    "the reader of the factors": Cheat(
        "import json\njson.loads = lambda text: ([[0]], [[0]])\n" + HONEST_KERNEL,
        "imports_refused",
        ("incorrect", "crashed"),
    ),
    "the writer of the result": Cheat(
        "import json\njson.dumps = lambda C: 'right'\ndef matmul(A, B): return 0",
        "imports_refused",
        ("incorrect", "crashed", "forged"),
    ),
    "the caller": Cheat(
        "import sys\nsys.modules['__main__'].multiply = lambda text: '[[1]]'\n"
        "def matmul(A, B): return 0",
        "imports_refused",
        ("incorrect",),
    ),
    "builtins": Cheat(
        "import builtins\nbuiltins.len = builtins.sum = lambda x: 0\n"
        "def matmul(A, B): return [[len(A)]]",
        "imports_refused",
        ("incorrect", "crashed"),
    ),
    "a wrong reply, early": Cheat(
        _FIND + PRODUCT + f"def matmul(A, B):\n    reply({_ZEROS})\n    return product(A, B)",
        "imports_refused",
        ("incorrect",),
    ),
    "the right reply, early": Cheat(
        _FIND + PRODUCT + "def matmul(A, B):\n    C = product(A, B)\n    reply(C)\n    return C",
        "imports_refused",
        (HONEST,),
    ),
    "the reply to the next call": Cheat(
        _FIND + "found = find()\nos.write(found['replies'], b'{\"id\": \"0\"}\\n')\n"
        "def matmul(A, B): return 0",
        "imports_refused",
        ("forged",),
    ),
    "a reply in print": Cheat(
        PRODUCT + 'def matmul(A, B):\n    print(\'{"id": "", "value": "right"}\')\n'
        f"    return {_ZEROS}",
        "incorrect",
        ("incorrect",),
    ),
    # It does not return.
    "an exit": Cheat("import os\ndef matmul(A, B): os._exit(0)", "imports_refused", ("crashed",)),
    "an exit with success": Cheat(
        "def matmul(A, B): raise SystemExit(0)", "hidden_names", ("raised",)
    ),
    "a recursion without end": Cheat(
        "def matmul(A, B): return matmul(A, B)", "raised", ("raised",)
    ),
    "all memory": Cheat("def matmul(A, B): return [0] * 10**11", "raised", ("raised",)),
    "no end": Cheat("def matmul(A, B):\n    while True: pass", "timeout", ("timeout",)),
    "no end while it is read": Cheat(
        "def forever():\n    while True: pass\nforever()\ndef matmul(A, B): pass",
        "timeout",
        ("timeout",),
    ),
    "no code": Cheat("It is right. Speedup: 1000.", "no_code", ()),
    "a kernel in a text": Cheat("code = 'def matmul(A, B): return 0'", "no_code", ("raised",)),
}
