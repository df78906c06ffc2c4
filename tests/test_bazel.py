# SPDX-License-Identifier: Apache-2.0
"""What Bazel reads holds together: BUILD and MODULE.bazel, evaluated here, against the code."""

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "launch/requirements-bazel.txt").read_text()
DISTRIBUTION = {"orbax": "orbax_checkpoint"}  # where it is not the name of the module


def label(name):
    return re.sub(r"[-_.]+", "_", name).lower()


def glob(include, exclude=(), allow_empty=False):
    """Bazel's: files below the root; each pattern must match one."""
    files = {}
    for pattern in include:
        paths = [p for p in ROOT.glob(pattern) if p.is_file() and "__pycache__" not in p.parts]
        assert paths or allow_empty, f"{pattern} must match a file"
        files |= {p.relative_to(ROOT).as_posix(): None for p in paths}
    return sorted(p for p in files if not any(fnmatch(p, e.replace("**/", "*")) for e in exclude))


@pytest.fixture(scope="module")
def build():
    """BUILD's variables, and under "targets" each target by name."""
    targets = {}

    def rule(kind):
        def declare(name, **attributes):
            assert name not in targets, f"two targets {name}"
            targets[name] = {"kind": kind, "deps": [], **attributes}

        return declare

    names = {
        "load": lambda *_: None,
        "glob": glob,
        "targets": targets,
        "py_library": rule("py_library"),
        "py_test": rule("py_test"),
    }
    exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), names)
    return names


@pytest.fixture(scope="module")
def locked():
    """Versions by label: more than one where another Python takes another."""
    versions = {}
    for name, version in re.findall(r"^([\w.-]+)==([^ ;\\]+)", LOCK, re.M):
        versions.setdefault(label(name), []).append(version)
    return versions


def product():
    return [p for folder in ("jaxmoe", "pallas_kernels") for p in (ROOT / folder).rglob("*.py")]


def layers(build):
    return [name for layer in build["LAYERS"] for name in layer.split(" | ")]


def imports(path):
    """Modules that a file names: import, from, and import_module or find_spec of a constant."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).endswith(("import_module", "find_spec")):
                yield str(node.args[0].value)


def base(*extras):
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {label(Requirement(line).name): Requirement(line) for line in lines}


def test_every_test_file_has_exactly_one_target(build):
    files = [t["args"][0] for t in build["targets"].values() if t["kind"] == "py_test"]
    assert sorted(files) == sorted(
        p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")
    )
    for target in build["targets"].values():
        assert target["kind"] != "py_test" or target["main"] in target["srcs"]


def test_no_test_imports_another():
    """Its target does not hold that file; what several share is in one that is no test."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not re.search(r"\btest_\w+", ast.unparse(node).partition(" import ")[0]), (
                    path.relative_to(ROOT),
                    ast.unparse(node),
                )


def test_every_module_is_in_exactly_one_library(build):
    owned = [
        source
        for target in build["targets"].values()
        for source in target.get("srcs", ())
        if source.startswith(("jaxmoe/", "pallas_kernels/"))
    ]
    assert sorted(owned) == sorted(p.relative_to(ROOT).as_posix() for p in product())


def test_a_library_depends_on_every_imported_layer(build):
    names = layers(build)
    for name in names:
        target = build["targets"][name]
        for source in target["srcs"]:
            for module in imports(ROOT / source):
                owner = next((n for n in names if f"{module}.".startswith(f"{n}.")), name)
                assert owner == name or f":{owner}" in target["deps"], (source, module)


def test_third_party_packages_are_the_imported_ones(build):
    expected = {}
    for name in layers(build):
        modules = {
            module.split(".")[0]
            for source in build["targets"][name]["srcs"]
            for module in imports(ROOT / source)
        } - set(sys.stdlib_module_names)
        packages = {label(DISTRIBUTION.get(m, m)) for m in modules} & set(base())
        if packages:
            expected[name] = " ".join(sorted(packages))
    expected_text = "\n".join(f'    "{name}": "{packages}",' for name, packages in expected.items())
    assert build["THIRD_PARTY"] == expected, f"THIRD_PARTY in BUILD must be\n{expected_text}"


def test_tests_get_the_base_and_dev_packages(build):
    assert sorted(build["TEST_PACKAGES"]) == sorted(base("dev"))


def test_the_lock_satisfies_pyproject_and_holds_every_label(build, locked):
    for name, requirement in base("dev").items():
        assert name in locked, f"{name} must be locked. {LOCK.splitlines()[1]}"
        assert all(map(requirement.specifier.contains, locked[name])), (requirement, locked[name])
    expected = {
        dep.removeprefix("@pypi//")
        for target in build["targets"].values()
        for dep in target["deps"]
        if dep.startswith("@pypi//")
    }
    assert expected <= set(locked)
    blocks = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.M)[1:]
    assert len(blocks) >= len(locked) and all("--hash=sha256:" in block for block in blocks)


def test_the_module_has_this_version_and_the_lock():
    calls = {
        ast.unparse(node.func): {k.arg: ast.literal_eval(k.value) for k in node.keywords}
        for node in ast.walk(ast.parse((ROOT / "MODULE.bazel").read_text()))
        if isinstance(node, ast.Call)
    }
    assert calls["module"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    assert f">={calls['python.toolchain']['python_version']}" == PROJECT["requires-python"]
    lock = calls["pip.parse"]["requirements_lock"].removeprefix("//:")
    assert (ROOT / lock).read_text() == LOCK
    assert f"-o {lock}" in LOCK.splitlines()[1]
    assert calls["pip.parse"]["python_version"] == calls["python.toolchain"]["python_version"]
