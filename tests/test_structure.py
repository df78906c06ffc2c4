# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRODUCT = sorted(
    p for folder in ("jaxmoe", "pallas_kernels", "configs") for p in (ROOT / folder).rglob("*.py")
)


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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


def test_bazel_and_import_contract_have_one_table():
    assert bazel_layers() == contract_layers()


def test_every_module_is_in_exactly_one_layer():
    names = [name for layer in bazel_layers() for name in layer]
    for path in PRODUCT:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] == "configs" or module in ("jaxmoe", "jaxmoe.vllm"):
            continue  # the last two only hold layers
        owners = [n for n in names if module == n or module.startswith(n + ".")]
        assert len(owners) == 1, f"{module} must be in one layer, is in {owners}"


def test_imports_point_down():
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout


@pytest.mark.parametrize("command", [["check", "."], ["format", "--check", "."]])
def test_ruff_has_nothing_to_say(command: list[str]):
    ruff = [sys.executable, "-m", "ruff", *command]
    completed = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


def test_the_formatter_is_on_everywhere():
    for path in [*PRODUCT, *(ROOT / "tests").rglob("*.py")]:
        assert "fmt" + ": skip" not in path.read_text(), path


def test_no_module_shadows_the_standard_library():
    for path in PRODUCT:
        assert path.stem not in sys.stdlib_module_names or path.stem == "__init__", path


def test_every_file_says_why_it_exists():
    for path in PRODUCT:
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert ast.get_docstring(parse_file(path)), path


def test_a_class_name_is_of_one_class():
    """Who reads or searches for a name finds one thing. There are no exceptions."""
    homes: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_einsum_letters_are_the_operands_shape_suffixes():
    for path in PRODUCT:
        for node in ast.walk(parse_file(path)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("einsum")):
                continue
            terms = ast.literal_eval(node.args[0]).split("->")[0].split(",")
            for term, operand in zip(terms, node.args[1:], strict=False):
                suffix = re.search(r"_([A-Z]+)$", ast.unparse(operand))
                assert suffix is None or suffix[1].lower() == term.strip().lower(), (path, term)


def test_jit_stays_at_the_edge():
    edge = {
        "ahead_of_time.py",
        "measure.py",
        "__main__.py",
        "train.py",
        "native.py",
        "doctor.py",
    }
    edge |= {"pooled_engine.py", "run.py"}  # run.py: weights are made cut over devices
    edge.add("update.py")  # RL's step, behind the checks of its arguments
    edge.add("start_codes.py")  # of the masters, once a step
    edge.add("check_collectives.py")  # before the run's first program
    edge.add("engine_weights.py")  # rounds the weights for the engine, once a step
    edge.add("sampling_copy.py")  # an evaluation's weights become its engine's, once
    edge.add("compare_export.py")  # an export's own programs, once
    edge.add("first_difference.py")  # a run's last words: programs of its own, once
    for path in PRODUCT:
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        assert path.name in edge or "jax.jit(" not in code, f"{path} must leave jit to its caller"


def test_few_branches_ask_for_lora_or_four_bits():
    """Others call jaxmoe/model/weights.py, or a function of a file that is about them."""
    own = (
        r"lora|adapter|peft|quant|mxfp4|round|packed|merge|stacks|weights|codes|expert_format|^base"
    )
    words = r"(?<!exp)lora|adapter|Adapted|low_rank|quant\b|[Mm]xfp4|four_bits|\bpacked and"
    branches = set[str]()
    for path in (ROOT / "jaxmoe").rglob("*.py"):
        # the plugin runs inside vLLM
        if re.search(own, path.stem) or path.parent.name in ("plugin", "peft"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else []
            tests += [node] if isinstance(node, ast.BoolOp) else []
            tests += node.ifs if isinstance(node, ast.comprehension) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "isinstance"):
                tests.append(node.args[0] if "require" in ast.unparse(node.func) else node)
            for test in tests:
                if re.search(words, re.sub(r"'.*?'", "", ast.unparse(test))):
                    branches.add(f"{path}:{test.lineno}")
    assert len(branches) <= 28, "\n".join(sorted(branches))


def test_each_config_has_its_command_and_expected_result():
    for path in (ROOT / "configs").glob("[a-z]*.py"):
        doc = ast.get_docstring(parse_file(path)) or ""
        for word in ("COMMAND", "EXPECT", "SOURCE"):
            assert word in doc, f"{path} must say {word} in its header"
        assert f"--config {path.name}" in doc
