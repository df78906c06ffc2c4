# SPDX-License-Identifier: Apache-2.0
"""Headers, indexes and weights that say what cannot be: one line each, naming the tensor."""

import json
import random
import re
import shutil
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.tensor_files import count_not_finite, find_tensors
from jaxmoe.config import ConfigError
from jaxmoe.model.params import param_specs
from tests.jaxmoe.small_models import SIX_EXPERTS

CFG = replace(SIX_EXPERTS, vocab_size=37, d_model=32, head_dim=6, n_experts=3, d_expert=64)
SINKS = "model.layers.1.self_attn.sinks"
DOWN = "model.layers.1.mlp.experts.down_proj"


def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: rng.standard_normal(s.shape, np.float32),
        param_specs(CFG),
        is_leaf=lambda s: hasattr(s, "hf"),
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    home = tmp_path_factory.mktemp("hf")
    save_params(params(), CFG, home / "shards", dtype="float32", max_shard_bytes=60_000)
    save_params(params(), CFG, home / "one", dtype="float32")
    save_params(params(), CFG, home / "packed", dtype="mxfp4")
    return home


def bits_of(tree):
    return [x.tobytes() for x in jax.tree.leaves(tree)]


def parts(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refused(directory, match):
    with pytest.raises(ConfigError, match=match) as error:
        load_params(directory, CFG, "float32")
    assert "\n" not in str(error.value)


def entry(**changes):
    return lambda h: h.update({SINKS: h[SINKS] | changes})


def move_offsets(delta):
    def change(h):
        h[SINKS]["data_offsets"] = [offset + delta for offset in h[SINKS]["data_offsets"]]

    return change


def twice(h):
    return json.dumps(h)[:-1].encode() + f', "{SINKS}": {json.dumps(h[SINKS])}}}'.encode()


HEADERS = {
    "no object": (entry(), lambda h: b"[]", "expected an object"),
    "not UTF-8": (entry(), lambda h: b'{"\xff": 1}', "must be a safetensors file"),
    "nested": (entry(), lambda h: b'{"a":' + b"[" * 100_000, "nested deeper than"),
    "twice": (entry(), twice, f"'{SINKS}' is a duplicate key"),
    "no entry": (lambda h: h.update({SINKS: 3}), None, f"{SINKS}' must have dtype"),
    "no shape": (lambda h: h[SINKS].pop("shape"), None, f"{SINKS}' must have dtype"),
    "dtype a list": (entry(dtype=[1]), None, "must be a safetensors file|must be BF16"),
    "dtype": (entry(dtype="F64"), None, f"{SINKS} must be BF16 or F16 or F32, got F64"),
    "narrower": (entry(dtype="BF16"), None, f"{SINKS} must have 8 bytes, got 16"),
    "shape a string": (entry(shape="4"), None, f"{SINKS}.*shape must be integers"),
    "shape negative": (entry(shape=[-4, -1]), None, f"{SINKS}.*shape must be integers"),
    "shape a float": (entry(shape=[4.0]), None, f"{SINKS}.*shape must be integers"),
    "another shape": (entry(shape=[2, 2]), None, rf"{SINKS} must have shape \(4,\), got \(2, 2\)"),
    "one offset": (entry(data_offsets=[0]), None, f"{SINKS}.*two data_offsets"),
    "offsets swapped": (lambda h: h[SINKS]["data_offsets"].reverse(), None, f"{SINKS} must have"),
    "negative offset": (move_offsets(-(10**6)), None, f"{SINKS}.*must be integers of 0 or more"),
    "overlap": (move_offsets(-4), None, "must begin at the end of the tensor before it"),
    "past the end": (move_offsets(10**6), None, "must begin at the end of the tensor before it"),
    "a gap": (lambda h: h.pop(SINKS), None, "digest without tensor|must begin at"),
    "a name of two lines": (
        lambda h: h.update({"a\nb": h[SINKS]}),
        None,
        r"'a\\nb' is not a printable name",
    ),
    "metadata": (lambda h: h.update({"__metadata__": 1}), None, "__metadata__ must be an object"),
    "digests": (lambda h: h["__metadata__"].update(digests="x"), None, "must be a safetensors"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_an_impossible_header_is_refused_by_name(exported, tmp_path, fault):
    change, spelt, match = HEADERS[fault]
    bad = shutil.copytree(exported / "one", tmp_path / "bad")
    header, data = parts(bad / "model.safetensors")
    change(header)
    write(bad / "model.safetensors", spelt(header) if spelt else header, data)
    refused(bad, match.replace("' must", " must"))


@pytest.mark.parametrize("length", [0, 3, 10**9, 2**64 - 1])
def test_a_header_of_an_absurd_length_is_refused(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{} ")
    refused(tmp_path, "must have .* bytes by its header|model.* is missing|must be a safetensors")


INDEXES = {
    "no JSON": (lambda text: text[:50], "must be JSON with a weight_map"),
    "no map": (lambda text: "{}", "must be JSON with a weight_map"),
    "a list": (lambda text: '{"weight_map": []}', "must be an object of tensor names"),
    "a number": (lambda text: '{"weight_map": {"a": 3}}', "must be an object of tensor names"),
    "no file": (lambda text: text.replace("00001-of", "00009-of"), "00009-of.* is missing"),
    "a path": (lambda text: text.replace("model-00001", "/model-00001"), "files in its folder"),
    "a ghost": (
        lambda text: re.sub(
            r'(": \{\s*)("[^"]+": )("model[^"]+")', r'\1"ghost": \3, \2\3', text, count=1
        ),
        "must hold ghost",
    ),
    "a NUL": (lambda text: text.replace("model-00001", "model\\u0000"), "files in its folder"),
    "no entry": (lambda text: text.replace(SINKS, "ghost"), f"also holds {SINKS}"),
}


@pytest.mark.parametrize("fault", INDEXES)
def test_an_index_that_cannot_be_is_refused(exported, tmp_path, fault):
    change, match = INDEXES[fault]
    bad = shutil.copytree(exported / "shards", tmp_path / "bad")
    path = bad / "model.safetensors.index.json"
    path.write_text(change(path.read_text()))
    refused(bad, match)


def test_two_sets_of_weights_are_refused(exported, tmp_path):
    """transformers would read model.safetensors, we the index."""
    bad = shutil.copytree(exported / "shards", tmp_path / "bad")
    (first_shard,) = list(bad.glob("model-00001-*"))
    shutil.copyfile(first_shard, bad / "model.safetensors")
    refused(bad, r"must hold one set of weights; model.safetensors and .*index.json are two")


def test_an_index_of_one_file_is_accepted(exported, tmp_path):
    folder = shutil.copytree(exported / "shards", tmp_path / "same")
    for path in folder.glob("model*"):
        path.unlink()
    save_file({"a": np.zeros(3, np.float32)}, folder / "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_tensors(folder).keys() == {"a"}


def foreign(path, change=lambda header, data: None):
    """Rewrite a file without digests, as other programs write it."""
    header, data = parts(path)
    header["__metadata__"] = {"format": "pt"}
    data = bytearray(data)
    change(header, data)
    write(path, header, bytes(data))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [SINKS, DOWN])
def test_nonfinite_weights_are_named_and_counted(exported, tmp_path, name, value):
    def change(header, data):
        offset = header[name]["data_offsets"][0]
        data[offset : offset + 8] = np.array([value, value], np.float32).tobytes()

    bad = shutil.copytree(exported / "one", tmp_path / "bad")
    foreign(bad / "model.safetensors")
    load_params(bad, CFG, "float32")
    foreign(bad / "model.safetensors", change)
    refused(bad, f"{name} must be finite in float32, got 2 NaN or infinite")


def test_weights_too_large_for_their_dtype_are_refused(exported, tmp_path):
    def change(header, data):
        offset = header[SINKS]["data_offsets"][0]
        data[offset : offset + 4] = np.array([3.4e38], np.float32).tobytes()

    bad = shutil.copytree(exported / "one", tmp_path / "bad")
    foreign(bad / "model.safetensors", change)
    load_params(bad, CFG, "float32")
    with pytest.raises(ConfigError, match=f"{SINKS} must be finite in bfloat16, got 1 "):
        load_params(bad, CFG, "bfloat16")


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (255, f"{DOWN}_scales must be at most 254, got 255 .* in 1 groups"),
        (254, f"{DOWN} must be finite in float32, got .* NaN or infinite"),
    ],
)
def test_scales_that_make_no_numbers_are_named(exported, tmp_path, scale, match):
    def change(header, data):
        data[header[DOWN + "_scales"]["data_offsets"][0]] = scale
        blocks = header[DOWN + "_blocks"]["data_offsets"][0]
        data[blocks : blocks + 16] = b"\x77" * 16

    bad = shutil.copytree(exported / "packed", tmp_path / "bad")
    foreign(bad / "model.safetensors", change)
    refused(bad, match)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_nonfinite_values_are_counted_from_the_bits(dtype):
    values = [0.0, -0.0, 1.0, np.nan, -np.nan, np.inf, -np.inf, np.finfo(np.float16).max]
    array = np.array([*values, ml_dtypes.finfo(dtype).smallest_subnormal], np.float32).astype(dtype)
    assert count_not_finite(array) == np.count_nonzero(~np.isfinite(array.astype(np.float32))) == 4


@pytest.mark.parametrize("dtype", ["shards", "packed"])
def test_random_damage_of_our_export_is_always_detected(exported, tmp_path, dtype, faults=60):
    draw, n_found = random.Random(0), 0
    want = bits_of(load_params(exported / dtype, CFG, "float32"))
    files = sorted(p.name for p in (exported / dtype).glob("model*"))
    for fault in range(faults):
        bad = shutil.copytree(exported / dtype, tmp_path / str(fault))
        path = bad / draw.choice(files)
        raw = bytearray(path.read_bytes())
        end = len(raw) if fault % 2 or path.suffix == ".json" else len(raw) - len(parts(path)[1])
        position = draw.randrange(end)
        if draw.random() < 0.8:
            raw[position] ^= 1 << draw.randrange(8)
        else:
            raw = raw[:position]
        path.write_bytes(raw)
        try:
            loaded = load_params(bad, CFG, "float32")
        except ConfigError as error:
            n_found += 1
            assert "\n" not in str(error) and str(bad) in str(error)
        else:
            assert bits_of(loaded) == want, f"{path.name} at {position} of {end}"
        shutil.rmtree(bad)
    assert n_found > faults / 2


def test_bit_flips_are_detected_in_our_files_only(exported, tmp_path):
    def flip(header, data):
        data[header[SINKS]["data_offsets"][0]] ^= 1

    bad = shutil.copytree(exported / "one", tmp_path / "bad")
    header, data = parts(bad / "model.safetensors")
    raw = bytearray(data)
    flip(header, raw)
    write(bad / "model.safetensors", header, bytes(raw))
    refused(bad, f"{SINKS} differs from the digest in its file")
    foreign(bad / "model.safetensors")
    load_params(bad, CFG, "float32")


def test_the_digests_are_metadata_that_the_library_reads(exported):
    from safetensors import safe_open

    with safe_open(exported / "one" / "model.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["digests"]).keys() == find_tensors(exported / "one").keys()
