# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from jaxmoe.config_file import load, override

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRODUCT = sorted(
    p for folder in ("jaxmoe", "pallas_kernels", "configs") for p in (ROOT / folder).rglob("*.py")
)


def bazel_layers() -> list[list[str]]:
    tree = ast.parse((ROOT / "BUILD").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [layer.split(" | ") for layer in ast.literal_eval(node.value)]
    raise AssertionError("BUILD must define LAYERS")


def contract_layers() -> list[list[str]]:
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["id"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def test_bazel_and_the_import_contract_hold_the_same_table():
    assert bazel_layers() == contract_layers()


def test_every_module_is_in_exactly_one_layer():
    names = [name for layer in bazel_layers() for name in layer]
    for path in PRODUCT:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] == "configs" or module == "jaxmoe":
            continue
        owners = [n for n in names if module == n or module.startswith(n + ".")]
        assert len(owners) == 1, f"{module} must be in one layer, is in {owners}"


def test_imports_point_down():
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", [["check", "."], ["format", "--check", "."]])
def test_ruff_has_nothing_to_say(command: list[str]):
    ruff = [sys.executable, "-m", "ruff", *command]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_module_shadows_the_standard_library():
    for path in PRODUCT:
        assert path.stem not in sys.stdlib_module_names or path.stem == "__init__", path


def test_every_file_says_why_it_exists():
    for path in PRODUCT:
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert ast.get_docstring(ast.parse(text)), path


def test_einsum_letters_are_the_operands_shape_suffixes():
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("einsum")):
                continue
            terms = ast.literal_eval(node.args[0]).split("->")[0].split(",")
            for term, operand in zip(terms, node.args[1:], strict=False):
                suffix = re.search(r"_([A-Z]+)$", ast.unparse(operand))
                assert suffix is None or suffix[1].lower() == term.strip().lower(), (path, term)


def test_jit_stays_at_the_edge():
    edge = {
        "ahead_of_time.py", "measure.py", "__main__.py", "train.py", "eval.py", "native.py",
        "doctor.py",
    }  # fmt: skip
    edge |= {"engine.py"}
    for path in PRODUCT:
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        assert path.name in edge or "jax.jit(" not in code, f"{path} must leave jit to its caller"


def test_the_readme_opens_with_two_complete_commands():
    text = (ROOT / "README.md").read_text()
    ends = {"main": "jaxmoe.train --config tiny.py", "tests": "pytest -q -n 2 --dist loadfile"}
    for mark, last in ends.items():
        block = re.search(rf"<!-- {mark} -->\n```\n(.*?)\n```", text, re.S)
        assert block, f"README must hold a code block after <!-- {mark} -->"
        assert "venv" in block[1] and "pip install" in block[1] and block[1].endswith(last)


def test_the_readmes_python_runs_as_it_stands():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["logp_BT"].shape == names["tokens_BT"].shape == (2, 24)
    assert names["experts_LBTA"].shape == (2, 2, 24, 2)


def test_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`((?:jaxmoe|pallas_kernels|configs|tests)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), name


def test_the_commands_of_readme_and_configs_resolve():
    texts = [ROOT / "README.md", *(ROOT / "configs").glob("[a-z]*.py")]
    commands = [
        shlex.split(line.partition("-m jaxmoe.")[2].partition("`")[0], comments=True)
        for path in texts
        for line in path.read_text().splitlines()
        if re.search(r"python -m jaxmoe\.(train|eval|doctor) --config", line) and "FILE" not in line
    ]
    assert len(commands) >= 5
    for _, _, config, *rest in commands:
        override(load(config), *(b for a, b in pairwise(rest) if a == "--set"))


def test_each_config_says_its_command_and_what_to_expect():
    for path in (ROOT / "configs").glob("[a-z]*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        for word in ("COMMAND", "EXPECT", "SOURCE"):
            assert word in doc, f"{path} must say {word} in its header"
        assert f"--config {path.name}" in doc
