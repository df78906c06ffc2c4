# SPDX-License-Identifier: Apache-2.0
"""What is carried to a device machine: what it lacks, in turn, once each, below the limit."""

import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.on_device import carried

PIP_LIST = """Package            Version
------------------ ------------
jax                0.11.2
ml_dtypes          0.5.4
torch              2.11.0+cu130
local              1.0    /opt/local
"""


def write_wheel(folder, name, version="1.0", needs=(), size=0):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr("data", b"0" * size)
    return path


@pytest.fixture
def registry(monkeypatch):
    """Wheels by name: version, and what they need."""
    wheels = {}

    def download_wheel(need, folder):
        version, needs = wheels[need.name]
        return write_wheel(folder, need.name, version, needs)

    monkeypatch.setattr(carried, "download_wheel", download_wheel)
    return wheels


def names(needs):
    return [need.name for need in needs]


def test_every_form_of_a_list_of_packages_is_read():
    columns = carried.parse_packages(PIP_LIST)
    assert set(columns) == {"jax", "ml-dtypes", "torch", "local"}
    assert columns["torch"] == Version("2.11.0+cu130")
    commas = carried.parse_packages("As read. Packages: jax 0.11.2, ml_dtypes, torch.")
    assert commas == {"jax": Version("0.11.2"), "ml-dtypes": None, "torch": None}
    assert carried.parse_packages("jax==0.11.2\nrich==14.1\n")["rich"] == Version("14.1")
    with pytest.raises(SystemExit, match="names no package"):
        carried.parse_packages("\n")


def test_missing_is_what_is_neither_there_nor_left_out():
    there = carried.parse_packages(PIP_LIST)
    wanted = [Requirement(x) for x in ("ml_dtypes", "grain>=0.2", "nvidia-cutlass-dsl", "jax>=1")]
    assert names(carried.find_missing(wanted, there)) == ["grain"]
    assert carried.find_unmet(wanted, there) == ["jax>=1: 0.11.2"]


def test_what_a_wheel_needs_is_carried_in_turn_and_once(registry, tmp_path):
    registry["grain"] = "0.2", ["array[path]", "portpicker", 'old; python_version < "3.12"']
    registry["array"] = "1", ["portpicker>=1", 'etils; extra == "path"', 'no; extra == "dev"']
    registry["portpicker"] = "1.6", ["torch>=3"]
    registry["etils"] = "2", []
    there = carried.parse_packages(PIP_LIST)
    wheels, unmet = carried.carry([Requirement("grain")], there, tmp_path)
    assert [x.name.partition("-")[0] for x in wheels] == ["grain", "array", "portpicker", "etils"]
    assert unmet == ["portpicker asks for torch>=3: 2.11.0+cu130"]
    table = carried.format_table(wheels, carried.check_size(wheels))
    assert "| portpicker | 1.6 | 0.00 |" in table and "4 wheels" in table


def test_two_versions_of_one_package_are_refused(registry, tmp_path):
    registry["grain"] = "0.2", ["bfi==1.1"]
    registry["bfi"] = "1.0", []
    with pytest.raises(SystemExit, match=r"bfi==1.1 is asked for beside bfi-1.0"):
        carried.carry([Requirement("bfi"), Requirement("grain")], {}, tmp_path)


def test_more_than_the_limit_is_refused_in_one_line(tmp_path):
    wheels = [write_wheel(tmp_path, "small"), write_wheel(tmp_path, "large", size=2**20)]
    assert carried.check_size(wheels, 2) > 1
    with pytest.raises(SystemExit, match="1.0 MiB, above 1 MiB; the largest is large-1.0") as error:
        carried.check_size(wheels, 1)
    assert "\n" not in str(error.value)


def test_a_wheel_for_another_python_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="another Python than 3.12"):
        carried._check_python(tmp_path / "pycosat-0.6.6-cp311-cp311-linux_x86_64.whl")
    for tags in ("cp312-cp312-linux_x86_64", "py3-none-any", "cp39-abi3-manylinux_2_17_x86_64"):
        wheel = tmp_path / f"psutil-7.0-{tags}.whl"
        assert carried._check_python(wheel) == wheel
