# SPDX-License-Identifier: Apache-2.0
"""The checks that come before anything is loaded: no vLLM, no torch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmoe.vllm.plugin import manifest
from jaxmoe.vllm.plugin.manifest import UpdateRejected
from jaxmoe.weight_sync.checksum import digest_array

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(5, np.float16),
    "c": np.zeros((3, 7), np.float32),
}
SHAPES = {name: array.shape for name, array in TENSORS.items()}


def raw(tensors=TENSORS, **changes):
    entries = {
        name: {
            "dtype": {"float32": "F32", "float16": "F16", "int32": "I32"}[a.dtype.name],
            "shape": list(a.shape),
            "digest": digest_array(a),
        }
        for name, a in tensors.items()
    }
    return {"format": 1, "run": "cd", "version": 7, "tensors": entries} | changes


def write_folder(folder, tensors=TENSORS, **changes):
    save_file(tensors, folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps(raw(**changes)))
    return manifest.read_manifest(folder)


def test_a_complete_update_passes_and_locates_tensors(tmp_path):
    expected = write_folder(tmp_path)
    assert expected.label == "cd:7"
    manifest.check_tensor_shapes(expected, SHAPES)
    spans = manifest.check_file_headers(expected, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, array in TENSORS.items():
        assert data[spans[name].begin : spans[name].end] == array.tobytes()


def test_two_files_without_shared_tensors_are_one_update(tmp_path):
    expected = write_folder(tmp_path, {"a": TENSORS["a"]})
    save_file({n: TENSORS[n] for n in "bc"}, tmp_path / "model-2.safetensors")
    assert set(manifest.check_file_headers(expected, tmp_path)) == set("abc")
    save_file({n: TENSORS[n] for n in "ac"}, tmp_path / "model-3.safetensors")
    with pytest.raises(
        UpdateRejected, match=r"a is in model.safetensors and in model-3|c is in model-2"
    ):
        manifest.check_file_headers(expected, tmp_path)


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (SHAPES | {"d": (4,)}, r"d is missing; the engine's model has it, \[4\]"),
        ({n: s for n, s in SHAPES.items() if n != "b"}, "b is not a tensor of the engine's model"),
        (SHAPES | {"c": (7, 3)}, r"c must be \[7, 3\] for the engine's model, got \[3, 7\]"),
    ],
)
def test_another_model_is_rejected_by_the_tensors_names(shapes, named):
    with pytest.raises(UpdateRejected, match=named):
        manifest.check_tensor_shapes(manifest.parse_manifest(raw(), "here"), shapes)


def test_a_type_that_is_no_weight_is_rejected():
    ints = TENSORS | {"b": np.ones(5, np.int32)}
    with pytest.raises(UpdateRejected, match="b must be F32 or BF16 or F16, got I32"):
        manifest.check_tensor_shapes(manifest.parse_manifest(raw(ints), "here"), SHAPES)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({n: TENSORS[n] for n in "ab"}, "c is in no"),
        (TENSORS | {"z": np.ones(2, np.float32)}, "z is in model.safetensors and not in the"),
        (TENSORS | {"b": np.ones(4, np.float16)}, r"b must be F16 \[5\] by the manifest, is F16"),
        (TENSORS | {"b": np.ones(5, np.float32)}, r"is F32 \[5\] in model.safetensors"),
    ],
)
def test_files_unlike_their_manifest_are_refused_by_tensor(tmp_path, tensors, named):
    expected = write_folder(tmp_path, tensors)
    with pytest.raises(UpdateRejected, match=named):
        manifest.check_file_headers(expected, tmp_path)


@pytest.mark.parametrize("n_bytes", [3, 8, 40, -1])
def test_a_file_cut_off_anywhere_is_rejected(tmp_path, n_bytes):
    expected = write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(
        UpdateRejected, match="cut off" if n_bytes == -1 else "complete safetensors file"
    ):
        manifest.check_file_headers(expected, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"format": 2}, {"version": "x"}, {"tensors": []}, {"tensors": {"a": {}}}]
)
def test_a_manifest_that_is_none_is_rejected(changes):
    with pytest.raises(UpdateRejected, match="here"):
        manifest.parse_manifest(raw() | changes, "here")


def test_a_missing_or_torn_manifest_is_rejected(tmp_path):
    with pytest.raises(UpdateRejected, match=r"manifest\.json"):
        manifest.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1,')
    with pytest.raises(UpdateRejected, match=r"manifest\.json"):
        manifest.read_manifest(tmp_path)


def test_files_must_come_with_digests(tmp_path):
    entries = raw()["tensors"]
    entries["c"]["digest"] = ""
    expected = write_folder(tmp_path, tensors=TENSORS)
    (tmp_path / "manifest.json").write_text(json.dumps(raw() | {"tensors": entries}))
    expected = manifest.read_manifest(tmp_path)
    with pytest.raises(UpdateRejected, match="c has no digest"):
        manifest.check_file_headers(expected, tmp_path)


def test_a_long_list_of_problems_is_counted():
    shapes = {str(n): (n,) for n in range(20)} | SHAPES
    with pytest.raises(UpdateRejected, match="and 14 more problems"):
        manifest.check_tensor_shapes(manifest.parse_manifest(raw(), "here"), shapes)


@pytest.mark.parametrize("folder_name", ["run", "run/3"])
@pytest.mark.parametrize("change", ["link", "everybody writes", "nothing"])
def test_folders_that_others_can_write_are_not_read(tmp_path, folder_name, change):
    (tmp_path / "run" / "3").mkdir(parents=True)
    manifest.check_folder_owner(tmp_path / "run" / "3")
    folder = tmp_path / folder_name
    if change == "everybody writes":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "aside")
        if change == "link":
            folder.symlink_to(tmp_path / "aside")
    with pytest.raises(
        UpdateRejected, match="must be (a folder of weights)|must belong to the user"
    ):
        manifest.check_folder_owner(tmp_path / "run" / "3")


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_link_for_a_file_is_not_followed(tmp_path, name):
    expected = write_folder(tmp_path)
    (tmp_path / name).rename(tmp_path / "aside")
    (tmp_path / name).symlink_to(tmp_path / "aside")
    with pytest.raises(UpdateRejected, match=f"{name} must be .*symbolic links"):
        manifest.read_manifest(tmp_path)
        manifest.check_file_headers(expected, tmp_path)
