# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's files, out and in; tests/parity compares with PEFT itself."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxmoe.checkpoint.peft import write as peft
from jaxmoe.checkpoint.peft.read import read_adapter
from jaxmoe.checkpoint.peft.write import CONFIG, FILE, save_adapter
from jaxmoe.config import ConfigError, LoraConfig
from jaxmoe.model.lora import Pair, lora_specs
from tests.jaxmoe.checkpoint.random_adapters import CFG, NAMES, is_same_tree, random_adapters

RANKS = {"w_q": 5, "w_k": 5, "w_v": 5, "w_o": 5, "w_gate_up": 2, "w_down": 2}
SQUARE = dataclasses.replace(CFG, d_expert=48)  # D = F, as GPT-OSS has it
LAYER = "base_model.model.model.layers.3."


LORA = LoraConfig(attention_rank=5, expert_rank=2)


def save_random(tmp_path, ranks=None, cfg=CFG, **options):
    adapters = random_adapters(cfg, ranks or RANKS)
    save_adapter(adapters, cfg, dataclasses.replace(LORA, **options), tmp_path / "a")
    return adapters, tmp_path / "a"


def change_file(folder, change):
    """Another's file: the tensors after a change, without our digests."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    return folder


def config(folder, **new):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | new))
    return folder


def refuse(match, folder, cfg=CFG):
    with pytest.raises(ConfigError, match=match) as error:
        read_adapter(folder, cfg)
    assert "\n" not in str(error.value)


def transposed(tensors) -> None:
    """Convert the experts to the layout of PEFT 0.19.0, in which A spans the outputs."""
    for a in [name for name in tensors if "experts" in name and "lora_A" in name]:
        b = a.replace("lora_A", "lora_B")
        rows, out = tensors[a].reshape(3, -1, tensors[a].shape[1]), tensors[b]
        out = out.reshape(out.shape[0], -1, 3)  # [out, R, E]
        tensors[a] = np.ascontiguousarray(out.transpose(2, 1, 0)).reshape(-1, out.shape[0])
        tensors[b] = np.ascontiguousarray(rows.transpose(2, 1, 0)).reshape(rows.shape[2], -1)


def test_the_files_hold_the_matrices_under_pefts_names(tmp_path):
    adapters, folder = save_random(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG, FILE]
    tensors = load_file(folder / FILE)
    assert len(tensors) == 2 * 6 * CFG.n_layers
    full = adapters["layers"]["full"]
    (a, b), q = full["w_q"], LAYER + "self_attn.q_proj.lora_"
    assert (tensors[q + "A.weight"] == a[1]).all() and (tensors[q + "B.weight"] == b[1].T).all()
    (a, b), down = full["w_down"], LAYER + "mlp.experts.lora_"
    (_, gate_up_b), inside = full["w_gate_up"], LAYER + "mlp.experts.base_layer.lora_"
    for e in range(3):
        for r in range(2):
            assert (tensors[down + "A.weight"][e * 2 + r] == a[1, e, r]).all()
            assert (tensors[down + "B.weight"][:, r * 3 + e] == b[1, e, r]).all()
            column = tensors[inside + "B.weight"][:, r * 3 + e]
            assert (column[0::2] == gate_up_b[1, e, r, :40]).all()  # gate
            assert (column[1::2] == gate_up_b[1, e, r, 40:]).all()  # up


def test_completely_trained_modules_are_stored_as_in_checkpoints(tmp_path):
    lora = dataclasses.replace(LORA, modules_to_save="router,norms,embedding,head")
    rng, adapters = np.random.default_rng(4), random_adapters(CFG, RANKS)
    draw = lambda x: rng.standard_normal(x.shape, np.float32)  # noqa: E731
    specs = lora_specs(CFG, lora)
    for kind, module in specs["layers"].items():
        adapters["layers"][kind] |= {
            n: draw(x) for n, x in module.items() if n in lora.fully_trained
        }
    adapters |= {name: draw(x) for name, x in specs.items() if name != "layers"}
    save_adapter(adapters, CFG, lora, tmp_path / "a")
    tensors, full = load_file(tmp_path / "a" / FILE), adapters["layers"]["full"]
    assert len(tensors) == 2 * 6 * CFG.n_layers + 4 * CFG.n_layers + 3
    module = "base_model.model.lm_head.weight"
    assert (tensors[module] == adapters["head"][:, : CFG.vocab_size].T).all()
    module = "base_model.model.model.embed_tokens.weight"
    assert (tensors[module] == adapters["embed"][: CFG.vocab_size]).all()
    assert (tensors["base_model.model.model.norm.weight"] == adapters["final_norm"]).all()
    for name, expected_array in (
        ("mlp.router.weight", full["w_router"][1].T),
        ("mlp.router.bias", full["b_router"][1]),
        ("input_layernorm.weight", full["attn_norm"][1]),
        ("post_attention_layernorm.weight", full["moe_norm"][1]),
    ):
        assert (tensors[LAYER + name] == expected_array).all(), name
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    norms = "input_layernorm", "post_attention_layernorm", "model.norm"
    assert config["modules_to_save"] == ["mlp.router", *norms, "embed_tokens", "lm_head"]
    refuse("modules_to_save must be off for jaxmoe", tmp_path / "a")
    for kept_out in ("sinks", "biases"):
        bad_lora = dataclasses.replace(LORA, modules_to_save=f"router,{kept_out}")
        with pytest.raises(ConfigError, match="complete modules; .* --merge"):
            save_adapter(adapters, CFG, bad_lora, tmp_path / kept_out)


def test_the_config_says_ranks_alphas_and_targets(tmp_path):
    _, folder = save_random(tmp_path, attention_alpha=6.0, expert_alpha=8.0)
    config = json.loads((folder / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 8.0)
    attention = [f"self_attn.{x}_proj" for x in "qkvo"]
    assert config["rank_pattern"] == dict.fromkeys(attention, 5)
    assert config["alpha_pattern"] == dict.fromkeys(attention, 6.0)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert not (config["use_rslora"] or config["use_dora"]) and config["bias"] == "none"


@pytest.mark.parametrize(
    "names", [NAMES, NAMES[:4], NAMES[4:], ("w_q", "w_v"), ("w_gate_up",), ("w_down",)]
)
@pytest.mark.parametrize("stabilized", [False, True])
def test_an_adapter_returns_bitwise_with_its_scales(tmp_path, names, stabilized):
    ranks = {name: RANKS[name] for name in names}
    adapters, folder = save_random(
        tmp_path, ranks, attention_alpha=6.0, expert_alpha=8.0, rank_stabilized=stabilized
    )
    loaded = read_adapter(folder, CFG)
    assert is_same_tree(loaded.adapters, adapters)
    alphas = {name: 8.0 if RANKS[name] == 2 else 6.0 for name in names}
    for name, scale in loaded.scales.items():
        assert scale == alphas[name] / (ranks[name] ** 0.5 if stabilized else ranks[name])
    assert loaded.expert_axis == ("in" if set(names) & set(NAMES[4:]) else None)


def test_peft_0_19_experts_are_read_by_shape(tmp_path):
    adapters, folder = save_random(tmp_path)
    loaded = read_adapter(change_file(folder, transposed), CFG)
    assert is_same_tree(loaded.adapters, adapters) and loaded.expert_axis == "out"
    with pytest.raises(ConfigError, match="A must span 'in', as in expert_axis; .* those of 'out'"):
        read_adapter(folder, CFG, expert_axis="in")


def test_gate_up_shows_the_layout_of_square_matrices(tmp_path):
    adapters, folder = save_random(tmp_path, cfg=SQUARE)
    loaded = read_adapter(change_file(folder, transposed), SQUARE)
    assert is_same_tree(loaded.adapters, adapters) and loaded.expert_axis == "out"


@pytest.mark.parametrize(
    ("version", "axis"),
    [("0.18.1", "in"), ("0.19.0", "out"), ("0.19.1", None), ("0.21.2", None), (None, None)],
)
def test_square_w_down_needs_a_peft_version(tmp_path, version, axis):
    adapters, folder = save_random(tmp_path, {"w_down": 2}, cfg=SQUARE)
    assert read_adapter(folder, SQUARE).expert_axis == "in"  # the digests say that it is ours
    config(
        change_file(folder, transposed if axis == "out" else lambda _: None), peft_version=version
    )
    if axis is None:
        refuse('have the same size; PEFT .* Pass expert_axis="in" if', folder, SQUARE)
    for loaded in [read_adapter(folder, SQUARE, expert_axis=axis or "in")] + (
        [read_adapter(folder, SQUARE)] if axis else []
    ):
        assert is_same_tree(loaded.adapters, adapters) and loaded.expert_axis == (axis or "in")


def test_bfloat16_adapters_are_stored_unchanged(tmp_path):
    adapters = random_adapters(CFG, {"w_v": 5})
    for leaves in adapters["layers"].values():
        leaves["w_v"] = Pair(*(jnp.asarray(x, jnp.bfloat16) for x in leaves["w_v"]))
    save_adapter(adapters, CFG, LORA, tmp_path / "a")
    with safe_open(tmp_path / "a" / FILE, framework="numpy") as file:
        stored = file.get_tensor(LAYER + "self_attn.v_proj.lora_A.weight")
    assert stored.dtype == ml_dtypes.bfloat16
    (a, _) = read_adapter(tmp_path / "a", CFG).adapters["layers"]["full"]["w_v"]
    assert a.dtype == np.float32 and (a[1] == stored).all()


# --- what is refused


def swapped(adapters):
    for leaves in adapters["layers"].values():
        leaves["w_q"] = Pair(*leaves["w_q"][::-1])


def of_another_rank(adapters):
    a, b = adapters["layers"]["full"]["w_q"]
    adapters["layers"]["full"]["w_q"] = Pair(a[:, :4], b)


BROKEN_ADAPTERS = {
    "swapped": (swapped, r"layers/sliding/w_q must have a \(2, 5, 48\).* got \(2, 5, 96\)"),
    "ranks": (of_another_rank, r"layers/full/w_q must have a .* got \(2, 4, 48\)"),
    "one kind of layer": (lambda x: x["layers"]["full"].pop("w_k"), "the same names in all"),
    "a norm": (lambda x: x.update(final_norm=np.ones(48)), "final_norm is none of them"),
    "a router": (
        lambda x: x["layers"]["full"].update(w_router=(np.ones((2, 1, 48)), np.ones((2, 1, 3)))),
        "w_router is none of them",
    ),
    "trained in full": (lambda x: x["layers"]["full"].update(w_q=np.ones((2, 48, 96))), "w_q is"),
    "nothing": (lambda x: x["layers"].clear(), "the same names in all layers"),
}


@pytest.mark.parametrize("change", BROKEN_ADAPTERS.values(), ids=BROKEN_ADAPTERS.keys())
def test_other_trees_than_the_models_are_refused(tmp_path, change):
    adapters = random_adapters(CFG, RANKS)
    change[0](adapters)
    with pytest.raises(ValueError, match=change[1]):
        save_adapter(adapters, CFG, LORA, tmp_path / "a")
    assert not list(tmp_path.iterdir())


UNREAD = {
    "dora": (dict(use_dora=True), "use_dora must be off"),
    "bias": (dict(bias="all"), "bias must be 'none' or None for jaxmoe, got 'all'"),
    "another method": (dict(peft_type="IA3"), "peft_type must be LORA, got 'IA3'"),
    "rank": (dict(r=3), r"mlp.experts.down_proj must have the rank in .*, 3.* rank 2"),
    "no alpha": (dict(lora_alpha=None), "must have r and lora_alpha for"),
    "a broken pattern": (dict(rank_pattern={"(": 2}), "rank_pattern must have names of modules"),
    "a pattern that never ends": (
        dict(rank_pattern={"((.*)*)*q": 4}),
        "rank_pattern must have names of modules",
    ),
    "many repeats": (dict(alpha_pattern={".*.*.*.*q": 4}), "at most 3 of"),
    "a pattern of nothing": (dict(rank_pattern=5), "rank_pattern must be an object"),
    "an endless alpha": (dict(lora_alpha=10**400), "must have r and lora_alpha for"),
    "alpha in words": (dict(lora_alpha="8"), "must have r and lora_alpha for"),
    "a number of parameters": (dict(target_parameters=5), "target_parameters must be a list"),
    "a key of a later PEFT": (dict(use_new_trick={"on": 1}), "use_new_trick must be off"),
    "zero for off": (dict(use_dora=0), "use_dora must be off"),
    "scaled in words": (dict(use_rslora="false"), "use_rslora must be true or false"),
    "loftq's config": (dict(loftq_config={"loftq_bits": 4}), "loftq_config must be off"),
    "a layer's alpha": (
        dict(alpha_pattern={"layers.3.self_attn.v_proj": 9.0}),
        "layers.3.self_attn.v_proj must have the same alpha in all layers",
    ),
    "a parameter less": (dict(target_parameters=["mlp.experts.down_proj"]), "adapts 2 of the exp"),
    "another parameter": (
        dict(target_parameters=["mlp.experts.down_proj", "mlp.router.weight"]),
        "target_parameters must list the adapted ones of mlp.experts.gate_up_proj",
    ),
}


@pytest.mark.parametrize("case", UNREAD.values(), ids=UNREAD.keys())
def test_a_config_with_unread_fields_is_refused(tmp_path, case):
    _, folder = save_random(tmp_path)
    refuse(case[1], config(folder, **case[0]))


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "eva", "lora_ga", "mystery", 1]
)
def test_adapters_initialised_from_the_base_are_refused(tmp_path, init):
    """PEFT takes them off the base as it loads: the files alone are another model."""
    _, folder = save_random(tmp_path)
    match = "init_lora_weights must be True or False or .*gaussian"
    refuse(match, config(folder, init_lora_weights=init))


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "orthogonal"])
def test_an_adapter_that_began_at_random_is_read(tmp_path, init):
    adapters, folder = save_random(tmp_path)
    assert is_same_tree(
        read_adapter(config(folder, init_lora_weights=init), CFG).adapters, adapters
    )


@pytest.mark.parametrize(
    "pattern",
    [r".*self_attn\.(q|k|v|o)_proj", r"layers\.\d+\.self_attn.[a-z]+_proj", "(?:q|k|v|o)_proj"],
)
def test_name_patterns_are_read_as_in_peft(tmp_path, pattern):
    ranks = dict.fromkeys(NAMES[:4], 5)
    _, folder = save_random(tmp_path, ranks, attention_alpha=6.0)
    read = read_adapter(config(folder, r=7, rank_pattern={pattern: 5}, alpha_pattern={}), CFG)
    assert set(read.scales.values()) == {6.0 / 5}


def drop(end):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if end in name]


def narrow(tensors):
    name = LAYER + "self_attn.o_proj.lora_B.weight"
    tensors[name] = tensors[name][:47].copy()


def with_nan(tensors):
    tensors[LAYER + "self_attn.o_proj.lora_A.weight"][2, 3] = np.nan


def renamed(tensors):
    tensors[LAYER.replace("3", "4") + "self_attn.q_proj.lora_A.weight"] = np.ones((5, 48), "f4")


def bytes_(tensors):
    name = LAYER + "self_attn.o_proj.lora_A.weight"
    tensors[name] = tensors[name].astype(np.uint8)


FILES = {
    "a layer less": (drop("layers.3.self_attn.q"), r"layers.3.self_attn.q_proj.lora_A\S+ is missi"),
    "half a pair": (drop("layers.3.self_attn.q_proj.lora_B"), r"q_proj.lora_B\S+ is missing"),
    "no experts": (drop("experts"), "adapts 0 of the experts' matrices"),
    "a layer more": (renamed, "layers.4.self_attn.q_proj.lora_A.weight is not a low-rank matrix"),
    "width": (narrow, r"o_proj.lora_A.weight and B must be \(5, 96\) and \(48, 5\).*\(47, 5\)"),
    "nan": (with_nan, "o_proj.lora_A.weight must be finite, got 1 NaN"),
    "bytes": (bytes_, "o_proj.lora_A.weight must be BF16 or F16 or F32, got U8"),
}


@pytest.mark.parametrize("case", FILES.values(), ids=FILES.keys())
def test_a_file_of_another_model_is_refused(tmp_path, case):
    _, folder = save_random(tmp_path)
    refuse(case[1], change_file(folder, case[0]))


OTHER_SIZES = dict(d_model=64, n_experts=4, n_layers=2, d_expert=56, n_q_heads=4)


@pytest.mark.parametrize("size", [*OTHER_SIZES.items(), ("n_layers", 6)])
def test_an_adapter_of_another_model_is_refused(tmp_path, size):
    _, folder = save_random(tmp_path)
    refuse("another model", folder, dataclasses.replace(CFG, **dict([size])))


def test_a_folder_without_its_files_is_refused(tmp_path):
    _, folder = save_random(tmp_path)
    refuse(f"must be a PEFT adapter's folder with {CONFIG}", tmp_path / "nowhere")
    (folder / FILE).unlink()
    refuse(f"{FILE} is missing", folder)


def test_flipped_bits_of_our_own_file_are_seen(tmp_path):
    _, folder = save_random(tmp_path)
    data = bytearray((folder / FILE).read_bytes())
    data[-3] ^= 1
    (folder / FILE).write_bytes(data)
    refuse("differs from the digest in its file", folder)


def test_an_adapter_never_writes_over_something(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="must be new"):
        save_adapter(random_adapters(CFG, RANKS), CFG, LORA, tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(peft, "write_shard", full)
    with pytest.raises(ConfigError, match="No space left"):
        save_adapter(random_adapters(CFG, RANKS), CFG, LORA, tmp_path / "a")
    assert not list(tmp_path.iterdir())
