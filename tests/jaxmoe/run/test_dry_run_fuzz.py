# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed, a dry run answers with a plan or with one line, and leaves nothing behind."""

import dataclasses
import os
import random
import sys

import pytest

from jaxmoe import cli, doctor, eval, train
from jaxmoe.collection import tasks
from jaxmoe.config import Config
from jaxmoe.config_file import load_config

VALUES = """
0 1 2 3 8 64 -1 -8 0.5 1e-4 -0.1 nan inf -inf 1e400 9999999999999999999 2**31 True false
None [] {} () '' 'x' a native vllm bfloat16 float32 own shared rollout recomputed reward
harmony {question} {question}{question} / /dev/null /proc/self/mem . .. ~ gone gone.jsonl
good.jsonl bad.jsonl empty.jsonl folder folder.jsonl good.parquet package:json/x.jsonl
package:jaxmoe/x package: reasoning_gym: reasoning_gym:chain_sum reasoning_gym:none = a=b +
* ppo_clip ppo_clip(clip_low=9) ppo_clip( ppo_clip(**{}) ppo_clip(clip_low='a')
ppo_clip(clip_low=[]) gspo gae veto gae(discount=2) token_is(high=2.0) bypass_pg_is
subprocess:Popen(args=['true']) os:system os:getcwd gone:f : a: :b json:loads shutil:rmtree
builtins:print mine:f mine:broken(x=1) mine:stops mine:scalar mine:score
seq_mean_token_sum_norm(length=0) http://localhost:1 http://[ files checkpoint
""".split()
VALUES += [
    "",
    " ",
    "9" * 400,
    "{'a': 1}",
    "[1, 2]",
    "ä\u2028\ud800",
    "\x00",
    "{system} {question}",
    "(" * 300,
    "1 *",
    "token_is(high=2.0) + veto",
    "0.5 * mine:score + 0.5 * mine:score",
    "nan * mine:score",
]
N_CASES = 80
CUSTOM_CONFIG = """
def f(logp_BT, advantages_BT): return logp_BT * advantages_BT
def broken(logp_BT, *, x): raise RuntimeError("mine")
def stops(logp_BT): raise SystemExit(3)
def scalar(logp_BT, logq_BT): return logp_BT.sum()
def score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
"""
FILES = [
    "",
    "get_config = 3",
    "def get_config(): return 3",
    "def get_config(:",
    "import gone",
    "raise ValueError('mine')",
    "def get_config(x): return x",
    "\x00",
    "1 / 0",
    "from jaxmoe.configs.tiny import get_config",
    "from jaxmoe.config import *\ndef get_config(): return Config()",
    "from jaxmoe.config import *\ndef get_config(): return OptimConfig(lr='a')",
    "from jaxmoe.configs import tiny\nfrom dataclasses import replace\n"
    "def get_config(): return replace(tiny.get_config(), steps='many')",
]


def keys(config=Config, prefix=""):
    """Every field, also of the parts."""
    tiny = load_config("tiny.py")
    for name in prefix.split(".")[:-1]:
        tiny = getattr(tiny, name)
    for field in dataclasses.fields(tiny):
        if dataclasses.is_dataclass(getattr(tiny, field.name)):
            yield from keys(prefix=f"{prefix}{field.name}.")
        yield prefix + field.name


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "mine.py").write_text(CUSTOM_CONFIG)
    row = '{"question": "1 + 1?", "answer": "2"}\n'
    (tmp_path / "good.jsonl").write_text("".join(row.replace("1 +", f"{i} +") for i in range(20)))
    (tmp_path / "bad.jsonl").write_text(row + '{"question": 3\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "good.parquet").write_bytes(b"PAR1")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    for i, text in enumerate(FILES):
        (tmp_path / f"file{i}.py").write_text(text)
    dice, known_keys = random.Random(3), sorted(keys())
    for i in range(N_CASES):
        part, dot, name = dice.choice(known_keys).rpartition(".")
        value = dice.choice([None, "a", "", -1, 0, 3, 2.5, 1e400, 10**400, True, [], {}, b"", ...])
        inner = f"{name}={value!r}".replace("inf", "float('inf')").replace("Ellipsis", "...")
        for part_name in reversed(part.split(".") if dot else []):
            prefix = part[: part.index(part_name) + len(part_name)]
            inner = f"{part_name}=replace(c.{prefix}, {inner})"
        (tmp_path / f"made{i}.py").write_text(
            "from jaxmoe.configs import tiny\nfrom dataclasses import replace\n"
            f"def get_config():\n    c = tiny.get_config()\n    return replace(c, {inner})\n"
        )
    yield tmp_path
    sys.modules.pop("mine", None)


events = []  # what an audit hook, which stays for good, was told of while `watching`
watching = []


def watch(event, args):
    # Programs that compile slowly, on a busy machine, are kept for other tests.
    if not watching or os.environ.get("JAX_COMPILATION_CACHE_DIR", "\0") in str(args[:1]):
        return
    writes = event == "open" and (
        (isinstance(args[1], str) and set(args[1]) & set("wax+"))
        or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )
    started = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
    if writes or event in (*started, "os.mkdir", "os.remove", "os.rename", "os.rmdir"):
        events.append((event, args))


def snapshot(folder):
    return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*"))


def fuzz(place, capsys, count, seed):
    sys.addaudithook(watch)
    dice, known_keys = random.Random(seed), list(keys())
    before, broke = snapshot(place), []
    for _ in range(count):
        name = dice.choice(["tiny.py"] * 8 + ["gptoss20b.py", "tiny_vllm.py"])
        if dice.random() < 0.1:
            name = f"file{dice.randrange(len(FILES))}.py"
        if dice.random() < 0.1:
            name = f"made{dice.randrange(N_CASES)}.py"
        args = ["--config", name, "--dry-run"]
        if name == "gptoss20b.py" and dice.random() < 0.5:
            args += ["--set", "mesh.fsdp=1"]
        for _ in range(dice.choice([1, 1, 1, 2, 3])):
            args += ["--set", f"{dice.choice(known_keys)}={dice.choice(VALUES)}"]
        if dice.random() < 0.2:
            args += ["--workdir", dice.choice(["run", "folder", "good.jsonl", "", "\x00", "/"])]
        main = dice.choice([train.main, train.main, eval.main, doctor.main])
        events.clear()
        watching.append(True)
        try:
            code = main(args)
        except BaseException as error:  # SystemExit among them
            # a config file's own bug keeps its traceback: it is the user's code
            is_input = name.startswith("file") or (
                # the type checks of tests come before the command's
                name.startswith("made") and type(error).__name__ == "TypeCheckError"
            )
            code = 2 if is_input else repr(error)
        finally:
            watching.clear()
        out, err = capsys.readouterr()
        one_line = code == 0 or err.count("error: ") <= 1 and "Traceback" not in err
        if code not in (0, 2) or not one_line or events:
            broke.append((args[1:], code, events[:2], err[-300:]))
    assert not broke, f"{len(broke)}:\n" + "\n".join(map(repr, broke[:40]))
    assert snapshot(place) == before


def test_forty_dry_runs_answer_and_leave_nothing(place, capsys):
    fuzz(place, capsys, 40, seed=1)
