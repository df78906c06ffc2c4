# SPDX-License-Identifier: Apache-2.0
"""Commands and Python of README and docs/: every one can be typed, and runs as printed.

Next: tests/test_docs_names.py.
"""

import ast
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernel_rows import list_kernel_rows

import jaxmoe.cli
import jaxmoe.plan.__main__ as plan
import studies.__main__ as study
from benchmarks.kernels.__main__ import parse_bench_arguments
from jaxmoe import __main__ as commands
from jaxmoe import doctor, eval, export, samples, train
from jaxmoe.config import Config
from jaxmoe.config_file import load_config
from jaxmoe.data import gym
from jaxmoe.data.tokenizer import write_byte_tokenizer
from jaxmoe.graders.instructions.checkers import INSTALL
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.vllm.plugin.compat import BACKENDS
from pallas_kernels.ahead_of_time import CHIPS
from pallas_kernels.check.__main__ import parse_check_arguments as checks
from tests.jaxmoe.sparse_checkpoint import write_sparse_checkpoint
from tests.pages import DOCS, FOREIGN, PAGES, ROOT, START, named

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
MARKERS = {m.partition(":")[0] for m in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
CONFIGS = sorted((ROOT / "configs").glob("[a-z]*.py"))
COMMANDS = {"train": train.main, "eval": eval.main, "doctor": doctor.main, "export": export.main}
OWN_MODULES = (
    "my_losses my_rewards my_task my_tools my_env my_graders my_servers own_engine "
    "notes_environment"
).split()


def fences(text: str, language: str) -> list[str]:
    """Their contents; marked examples run in tests/jaxmoe/rl/test_extending.py."""
    text = re.sub(r"<!-- example: .*?<!-- /example -->", "", text, flags=re.S)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def typed(path: Path) -> Iterator[str]:
    """Lines of fenced and indented blocks that are commands, and code spans that are."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from re.findall(r"(?:COMMAND +|^ {6,})(python .*)$", text, re.M)
        return
    lines = [line for block in fences(text, r"\w*") for line in block.splitlines()]
    lines += re.findall(r"^ {4}(\S.*)$", text, re.M)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    lines += re.findall(r"`([^`\n]+)`", prose)
    yield from (line for line in lines if START.match(line))


def parts(line: str) -> Iterator[list[str]]:
    """The commands that `&&` joins, without variables set before them and paths of programs."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        yield [re.sub(r"^.*/bin/", "", words[0]), *words[1:]]
        words = []


TYPED = sorted({line: named(p) for p in [*PAGES, *CONFIGS] for line in typed(p)}.items())


@pytest.fixture(scope="module")
def datasets():
    """Makes each data set of reasoning-gym once: that is a third of a dry run."""
    make, made = gym._make_gym_dataset, {}

    def make_once(*args):
        if repr(args) not in made:
            made[repr(args)] = make(*args)
        return made[repr(args)]

    return make_once


@pytest.fixture
def example(tmp_path, monkeypatch, datasets):
    """A folder with the files that the pages tell the reader to make, as the current one."""
    blocks = fences((ROOT / "docs/extending.md").read_text(), "python")
    (tmp_path / "my_servers.py").write_text(next(b for b in blocks if "MyBackend" in b))
    named_there = ("def soft_clip", "def z_loss", "def spread")
    code = [block for block in blocks if any(name in block for name in named_there)]
    assert len(code) == len(named_there)
    (tmp_path / "my_losses.py").write_text("\n".join(code))
    for name in ("own_engine", "notes_environment"):
        shutil.copy(ROOT / f"docs/examples/{name}.py", tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "kernels.jsonl").write_text("\n".join(map(json.dumps, list_kernel_rows())))
    page = (ROOT / "docs/data.md").read_text()
    (tmp_path / "my_rewards.py").write_text(fences(page, "python")[0])
    tools, environment = fences((ROOT / "docs/agents.md").read_text(), "python")
    (tmp_path / "my_tools.py").write_text(tools)
    (tmp_path / "my_env.py").write_text(environment)
    task, _ = fences((ROOT / "README.md").read_text(), "python")
    (tmp_path / "my_task.py").write_text(task)
    (grader,) = fences((ROOT / "docs/reward_hacking.md").read_text(), "python")
    (tmp_path / "my_graders.py").write_text(grader)
    (rows,) = fences(page, "json")  # "a line a question": more of the same kind
    more = [{"prompt": f"{n}+1=", "answer": n + 1, "unit": ""} for n in range(10, 1400)]
    (tmp_path / "sums.jsonl").write_text(rows + "\n".join(map(json.dumps, more)))
    problems = [
        {"prompt": f"def f{i}(x):\n", "entry_point": f"f{i}", "test": f"assert f{i}(1) == 1"}
        for i in range(3)
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (tmp_path / "my_questions.jsonl").write_text("\n".join(map(json.dumps, more)))
    sample = {"stage": "rl", "step": 4, "kind": "held_out", "prompt": "abc", "response": "cba"}
    for run in ("runs/tiny", "runs/tiny_tool"):  # what the commands above them leave
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "samples.jsonl").write_text(json.dumps(sample | {"reward": 1.0}) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxmoe.cli, "keep_freed_memory", lambda: True)
    monkeypatch.setattr("jaxmoe.collection.tasks.CHECK_ROWS_S", 0.0)
    for place in ("jaxmoe.run.memory", "jaxmoe.parallel.limits"):  # another machine's is larger
        monkeypatch.setattr(f"{place}.count_free_bytes", lambda: 10**12)
    monkeypatch.setattr(gym, "_make_gym_dataset", datasets)
    for name in OWN_MODULES:  # other tests have some of these names
        sys.modules.pop(name, None)
    yield
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("line, page", TYPED, ids=[f"{p}: {c[:70]}" for c, p in TYPED])
def test_a_command_can_be_typed(line, page, example, capsys):
    for command in parts(line):
        check(command)


def check(command: list[str]) -> None:
    program, *args = command
    if program == "launch/local.sh":
        assert (ROOT / program).exists()
        dry(["train", *args[1:]])
    elif program == "launch/vllm_server.sh":
        serves(started(args))
    elif program == "pip":
        installs(args)
    elif program in FOREIGN:
        pass
    elif args[:1] != ["-m"]:
        script(*args)
    elif args[1] == "jaxmoe.samples":
        if args[2:] not in ([], ["RUN"]):
            assert samples.main(args[2:]) == 0
    elif args[1] == "jaxmoe.plan":
        plans(args[2:])
    elif args[1] == "studies":
        study.make_study_parser().parse_args(args[2:])
    elif args[1].startswith("jaxmoe."):
        dry([args[1].removeprefix("jaxmoe."), *args[2:]])
    elif args[1] == "benchmarks.kernels":
        benches(args[2:])
    elif args[1].startswith("benchmarks."):
        path = args[1].replace(".", "/")
        is_package = args[1] == "benchmarks.on_device"
        script(f"{path}/__main__.py" if is_package else f"{path}.py", *args[2:])
    elif args[1] == "pallas_kernels.check":
        checks(args[2:])
    elif args[1] == "jaxmoe":
        assert commands.main(args[2:]) == 0
    elif args[1] == "pytest":
        collects(args[2:])
    elif args[1] == "vllm.entrypoints.openai.api_server":
        serves(args[2:])
    else:
        assert args[1] == "venv", f"tests/test_docs.py must learn to check {args[1]}"


def dry(args: list[str]) -> None:
    """A command of the product as it is printed, without its work (--dry-run), must be accepted.

    Of a config with released weights, which are not here, with `at_hand` in their place.
    """
    main, rest = COMMANDS[args[0]], args[1:]
    if rest and "FILE" not in rest:
        rest = [a for a in rest if a != "--dry-run"]
        cfg = load_config(rest[rest.index("--config") + 1])
        if "instructions" in f"{cfg.data.rewards} {rest}" and find_spec("if_verifiable") is None:
            pytest.skip(INSTALL)
        if any("math_scorer" in a for a in rest) and find_spec("math_verify") is None:
            pytest.skip("needs math-verify: pip install math-verify")
        with tempfile.TemporaryDirectory() as folder:
            released = at_hand(cfg, Path(folder)) if cfg.init.checkpoint else []
            released += teacher_at_hand(cfg, rest, Path(folder) / "teacher")
            assert main([*rest, *released, "--dry-run"]) == 0


def teacher_at_hand(cfg: Config, words: list[str], folder: Path) -> list[str]:
    """A teacher without data in the place of a folder that is not here."""
    typed = [w.partition("=")[2] for w in words if w.startswith("distill.teacher=")]
    if not replace(cfg.distill, teacher=[cfg.distill.teacher, *typed][-1]).has_folder:
        return []
    folder.mkdir()
    write_sparse_checkpoint(folder, cfg.model, "bfloat16")
    write_byte_tokenizer(folder)
    return ["--set", f"distill.teacher={folder}"]


def at_hand(cfg: Config, folder: Path) -> list[str]:
    """A checkpoint without data, a tokenizer and rows in the place of those of a config.

    No adapter is here, so that a run cannot start from one.
    """
    write_sparse_checkpoint(folder, cfg.model)
    sets = [
        f"init.checkpoint={folder}",
        "init.tokenizer=bytes",
        "data.options={}",
        "lora.init_from=",
        # An example's rows are here.
        *([] if cfg.data.task == "kernels.jsonl" else ["data.task=reasoning_gym:spell_backward"]),
        # Tools are declared in harmony format, which the byte tokenizer has.
        *([] if cfg.has_environment else ["data.template={system}{question}"]),
    ]
    return [x for change in sets for x in ("--set", change)]


def plans(args: list[str]) -> None:
    """The mesh of the config is one of the machine, whose compiler may be elsewhere."""
    if not args or "FILE" in args:
        return
    read = plan.make_plan_parser().parse_args(args)
    cfg = jaxmoe.cli.config_from_args(read)
    check_mesh(cfg)
    chip, _, layout = read.topology.partition(":")
    chips = math.prod(int(size) for size in layout.split("x"))
    assert chip in CHIPS and cfg.mesh.devices == chips * (2 if chip == "tpu7x" else 1)


def benches(args: list[str]) -> None:
    if args and args[0] != "OP":
        _, read = parse_bench_arguments(args)
        module, _, name = (read.vs or "").partition(":")
        if name:
            source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
            assert re.search(rf"^(def )?{name}\b", source, re.M), f"{module} must have {name}"


def collects(args: list[str]) -> None:
    """Paths, markers, and names that -k asks for are there."""
    places = [a for a in args if a.startswith("tests/")]
    for place in places:
        assert (ROOT / place).exists(), place
    for flag, known in (("-m", MARKERS), ("-k", None)):
        if flag not in args:
            continue
        words = set(re.findall(r"\w+", args[args.index(flag) + 1])) - {"and", "or", "not"}
        if known is not None:
            assert words <= known, f"no marker {words - known}"
            continue
        files = [f for p in places or ["tests"] for f in [ROOT / p, *(ROOT / p).rglob("*.py")]]
        names = " ".join(
            name
            for f in files
            if f.is_file()
            for name in [f.stem, *re.findall(r"def (test_\w+)", f.read_text())]
        )
        assert all(word in names for word in words), f"no test in {places} for {words}"


def script(path: str, *args: str) -> None:
    """A file of ours that knows these flags."""
    source = (ROOT / path).read_text()
    for flag in args:
        assert not flag.startswith("--") or re.search(rf'add_argument\(\s*"{flag}"', source), (
            path,
            flag,
        )


def installs(args: list[str]) -> None:
    for word in args:
        extra = re.fullmatch(r"(?:\.|jaxmoe)\[(.*)\]", word)
        assert extra is None or set(extra[1].split(",")) <= set(EXTRAS), word
        assert not word.endswith(".txt") or (ROOT / word).exists(), word
        assert not word.startswith("vllm==") or [word] == EXTRAS["vllm"], word


def started(args: list[str]) -> list[str]:
    """What launch/vllm_server.sh starts with these arguments, by a double of Python."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python-double"
        python.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
        python.chmod(0o755)
        completed = subprocess.run(
            [str(ROOT / "launch/vllm_server.sh"), *args],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"VLLM_API_KEY": "key", "PYTHON": str(python)},
        )
    return completed.stdout.splitlines()


def serves(args: list[str]) -> None:
    """What is ours of a vLLM's options: the worker's class, and the backend of weight transfer."""
    options = dict(zip(args, args[1:], strict=False))
    module, _, name = options["--worker-extension-cls"].rpartition(".")
    assert f"class {name}" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert ast.literal_eval(options["--weight-transfer-config"])["backend"] in BACKENDS


def test_the_pages_hold_commands():
    """Or nothing above looks at anything."""
    read = {page for _, page in TYPED}
    assert len(TYPED) > 40 and {"README.md", "docs/rollouts.md", "configs/tiny.py"} <= read


def test_the_readme_opens_with_two_complete_commands():
    text = (ROOT / "README.md").read_text()
    ends = {"main": "jaxmoe.train --config tiny.py", "tests": "pytest -q -n 2 --dist loadfile"}
    for mark, last in ends.items():
        block = re.search(rf"<!-- {mark} -->\n```\n(.*?)\n```", text, re.S)
        assert block, f"README must hold a code block after <!-- {mark} -->"
        assert "venv" in block[1] and "pip install" in block[1] and block[1].endswith(last)
    assert len(text.splitlines()) <= 120, "README is the entrance; docs/ has the room"


def test_the_readmes_python_runs_as_it_stands():
    _, block = fences((ROOT / "README.md").read_text(), "python")
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["logp_BT"].shape == names["tokens_BT"].shape == (2, 24)
    assert names["experts_LBTA"].shape == (2, 2, 24, 2)


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_the_python_of_the_docs_runs(page):
    for block in fences(page.read_text(), "python"):
        exec(compile(block, named(page), "exec"), {"__name__": page.stem})


def test_pages_import_what_their_python_uses(tmp_path):
    for page in PAGES:
        for number, block in enumerate(fences(page.read_text(), "python")):
            name = f"{named(page)}_{number}.py".replace("/", "_")
            (tmp_path / name).write_text(block)
    completed = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,I", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout
