# SPDX-License-Identifier: Apache-2.0
"""Wheels that a device machine without a network lacks, and nothing that it has.

    pip list > pip_list.txt                                  # on the device machine
    python benchmarks/on_device/carried.py pip_list.txt --into .whl
    pip install --no-index --no-deps --target SITE .whl/*.whl       # there, with SITE in PYTHONPATH

The first file may also be names with commas between them, each with a version or without. A package
that is there is never carried, in whatever version; where something asks for another version, the
output says so. What has no wheel is built, so run it with the device machine's Python, with pip and
`packaging`.
Next: stage.py.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

LIMIT_MIB = 60
PYTHON = "3.12"
GLIBC = (
    *(f"manylinux_2_{minor}" for minor in (28, 27, 24, 17, 5)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)
FOR_THE_TESTS = (
    "beartype",
    "hypothesis",
    "jax-triton>=0.3",
    "nvidia-cudnn-frontend",
    "psutil",
    "pytest-timeout",
    "pytest-xdist",
)
# For the newer half of cudnn-frontend; its graphs, which the peer makes, use neither.
LEFT_OUT = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}

Packages = dict[str, Version | None]  # by canonical name; None where the list has no version


def parse_packages(text: str) -> Packages:
    """Return what a printed `pip list`, `pip freeze` or list with commas names."""
    lines = text.splitlines()
    rule = next((i for i, line in enumerate(lines) if re.fullmatch(r"-+( +-+)+ *", line)), None)
    if rule is not None:
        items = [line.split() for line in lines[rule + 1 :]]
    elif "," in text:
        text = text.rpartition("Packages:")[2].strip().removesuffix(".")
        items = [item.split() for item in text.split(",")]
    else:
        items = [re.split(r"==|\s+", line.strip()) for line in lines]
    found: Packages = {}
    for name, *rest in filter(None, items):
        if re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", name):
            found[canonicalize_name(name)] = Version(rest[0]) if rest else None
    if not found:
        raise SystemExit("carried: the list names no package. Give it what `pip list` prints.")
    return found


def find_needs(wheel: Path, extras: set[str]) -> list[Requirement]:
    """Return what a wheel's METADATA requires on the device machine."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    needs = map(Requirement, metadata.get_all("Requires-Dist") or [])
    return [
        need
        for need in needs
        if need.marker is None
        or any(need.marker.evaluate({**MARKERS, "extra": extra}) for extra in {"", *extras})
    ]


def download_wheel(need: Requirement, folder: Path) -> Path:
    """Download one wheel for the device machine, or build it where the registry has none."""
    wanted = f"{need.name}{need.specifier}"
    shared = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    platforms = [part for glibc in GLIBC for part in ("--platform", f"{glibc}_x86_64")]
    download = [
        "download",
        *shared,
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
        *platforms,
        "--dest",
        str(folder),
        wanted,
    ]
    build = ["wheel", *shared, "--wheel-dir", str(folder), wanted]
    said = ""
    for command in (download, build):
        before = set(folder.glob("*.whl"))
        done = subprocess.run(
            [sys.executable, "-m", "pip", *command], capture_output=True, text=True
        )
        made = set(folder.glob("*.whl")) - before
        if done.returncode == 0 and made:
            return _check_python(made.pop())
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    raise SystemExit(f"carried: no wheel of {wanted}: {said}")


def _check_python(wheel: Path) -> Path:
    tags = parse_wheel_filename(wheel.name)[3]
    digits = PYTHON.replace(".", "")
    if not any(
        tag.interpreter in ("py3", f"cp{digits}", f"py{digits}") or tag.abi == "abi3"
        for tag in tags
    ):
        raise SystemExit(
            f"carried: {wheel.name} was built for another Python than {PYTHON}. "
            f"Run this with Python {PYTHON}."
        )
    return wheel


def find_missing(wanted: list[Requirement], there: Packages) -> list[Requirement]:
    """Return those of `wanted` that are not there and not left out."""
    return [
        need
        for need in wanted
        if canonicalize_name(need.name) not in there and need.name not in LEFT_OUT
    ]


def find_unmet(wanted: list[Requirement], there: Packages) -> list[str]:
    """Return those of `wanted` that are there in a version they do not take, as `need: version`."""
    versions = [(need, there.get(canonicalize_name(need.name))) for need in wanted]
    return [
        f"{need.name}{need.specifier}: {version}"
        for need, version in versions
        if version is not None and not need.specifier.contains(version, prereleases=True)
    ]


def carry(roots: list[Requirement], there: Packages, folder: Path) -> tuple[list[Path], list[str]]:
    """Download into `folder` what `roots` need in turn; return the wheels and what is unmet."""
    wheels: dict[str, Path] = {}
    unmet, asked = find_unmet(roots, there), find_missing(roots, there)
    while asked:
        need = asked.pop(0)
        name = canonicalize_name(need.name)
        if name not in wheels:
            wheels[name] = download_wheel(need, folder)
            needs = find_needs(wheels[name], need.extras)
            unmet += [f"{name} asks for {line}" for line in find_unmet(needs, there)]
            asked += find_missing(needs, there)
        version = parse_wheel_filename(wheels[name].name)[1]
        if not need.specifier.contains(version, prereleases=True):
            raise SystemExit(f"carried: {need} is asked for beside {wheels[name].name}.")
    return list(wheels.values()), unmet


def check_size(wheels: list[Path], limit_mib: float = LIMIT_MIB) -> float:
    """Return the MiB of all wheels, which may not pass the limit."""
    total = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if total > limit_mib:
        largest = max(wheels, key=lambda wheel: wheel.stat().st_size)
        raise SystemExit(
            f"carried: the wheels have {total:.1f} MiB, above {limit_mib:g} MiB; the largest is "
            f"{largest.name}. Leave a package out of FOR_THE_TESTS, or put one into LEFT_OUT."
        )
    return total


def format_table(wheels: list[Path], total: float) -> str:
    """Return the table of names, versions and MiB, and its total."""
    rows = ["| name | version | MiB |", "|---|---|---|"]
    for wheel in sorted(wheels, key=lambda wheel: wheel.name.lower()):
        name, version, *_ = parse_wheel_filename(wheel.name)
        rows.append(f"| {name} | {version} | {wheel.stat().st_size / 2**20:.2f} |")
    return "\n".join([*rows, f"| total | {len(wheels)} wheels | {total:.1f} |"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pip_list", type=Path, help="what pip list printed on the device machine")
    parser.add_argument("--into", type=Path, required=True, help="a folder for the wheels")
    args = parser.parse_args(argv)
    project = Path(__file__).parents[2] / "pyproject.toml"
    dependencies = tomllib.loads(project.read_text())["project"]["dependencies"]
    roots = [Requirement(text) for text in (*dependencies, *FOR_THE_TESTS)]
    there = parse_packages(args.pip_list.read_text())
    print("missing:", ", ".join(str(need) for need in find_missing(roots, there)) or "nothing")
    with tempfile.TemporaryDirectory() as folder:
        wheels, unmet = carry(roots, there, Path(folder))
        total = check_size(wheels)
        args.into.mkdir(parents=True, exist_ok=True)
        for old in args.into.glob("*.whl"):
            old.unlink()
        for wheel in wheels:
            (args.into / wheel.name).write_bytes(wheel.read_bytes())
        print(format_table(wheels, total))
    for line in unmet:
        print("there in another version:", line)


if __name__ == "__main__":
    main()
