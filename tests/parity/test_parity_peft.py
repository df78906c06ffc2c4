# SPDX-License-Identifier: Apache-2.0
"""Adapters through PEFT's files, against PEFT itself on `transformers`' GptOss, both ways.

Each matrix's delta is compared with the one that our A and B give, not with "something changed";
log-probs of the adapted model by the three-way rule of test_parity_forward.py, against the oracle
that has our float64 deltas. D = 48, F = 40: a transposed delta has another shape.
"""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.peft import config as peft_config
from jaxmoe.checkpoint.peft.layout import TARGETS
from jaxmoe.checkpoint.peft.read import read_adapter
from jaxmoe.checkpoint.peft.write import CONFIG, save_adapter
from jaxmoe.config import ConfigError, LoraConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.config import from_hf
from jaxmoe.model.lora import Pair, init_adapters
from jaxmoe.rl.state import init_run_adapters
from tests.jaxmoe.checkpoint.random_adapters import (
    delta,
    is_same_tree,
    merge_adapters,
    random_adapters,
)

pytestmark = [
    pytest.mark.parity,
    # peft 0.18 says that it does not know GptOssExperts, 0.21 that a parameter's pattern matches no
    # module, transformers that peft calls it by an old name
    pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning:peft"),
]

OPS, EPS = plain_ops(), 2.0**-23
LAYERS = [(layer, ("sliding", "full")[layer % 2], layer // 2) for layer in range(4)]
SETTINGS = {
    "both": dict(ranks=dict.fromkeys(TARGETS, 3)),
    "other ranks": dict(
        ranks={n: 2 if n in ("w_gate_up", "w_down") else 5 for n in TARGETS},
        attention_alpha=6.0,
        expert_alpha=9.0,
    ),
    "stabilized": dict(ranks={n: 4 for n in TARGETS}, rank_stabilized=True),
    "experts": dict(ranks=dict(w_gate_up=2, w_down=2)),
    "one matrix": dict(ranks=dict(w_down=2)),
    "attention": dict(ranks=dict(w_q=3, w_v=3)),
}


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="compares with peft: pip install -e '.[parity]'")


@pytest.fixture(scope="module")
def setting(hugging, tmp_path_factory):
    """(their model, our config, our weights, tokens)."""
    model, folder = hugging.model(), tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    cfg = dataclasses.replace(from_hf(model.config.to_dict()), dtype="float32")
    tokens = np.random.default_rng(2).integers(0, cfg.vocab_size, (2, 23))
    return model, cfg, load_params(folder, cfg, "float32"), tokens


def lora_of(ranks, **options) -> LoraConfig:
    attention, expert = (
        next((r for n, r in ranks.items() if (n in ("w_gate_up", "w_down")) == of_experts), 0)
        for of_experts in (False, True)
    )
    return LoraConfig(attention_rank=attention, expert_rank=expert, **options)


def scales_of(ranks, attention_alpha=16.0, expert_alpha=16.0, rank_stabilized=False):
    """alpha / rank, or alpha / sqrt(rank)."""
    alphas = {n: expert_alpha if n in ("w_gate_up", "w_down") else attention_alpha for n in ranks}
    return {n: alphas[n] / (r**0.5 if rank_stabilized else r) for n, r in ranks.items()}


def theirs_of(name: str, pair: int, wide: np.ndarray) -> np.ndarray:
    """Our delta of one layer as their parameter has it: [out, in], or [E, in, out] in turns."""
    target = wide[pair]
    if target.ndim == 2:
        return target.T
    if name != "w_gate_up":
        return target
    half = target.shape[-1] // 2
    turns = np.empty_like(target)
    turns[..., 0::2], turns[..., 1::2] = target[..., :half], target[..., half:]
    return turns


def module_and_parameter(model, layer: int, name: str):
    block, path = model.model.layers[layer], TARGETS[name].split(".")
    if path[0] == "self_attn":
        return getattr(block.self_attn, path[1]), "weight"
    return block.mlp.experts, path[2]


def list_deltas(peft_model):
    """{(layer, our name): PEFT's own delta of that parameter}."""
    deltas_found = {}
    for layer, _, _ in LAYERS:
        block = peft_model.base_model.model.model.layers[layer]
        for name, path in TARGETS.items():
            if path.startswith("self_attn."):
                module = getattr(block.self_attn, path.split(".")[1])
                if hasattr(module, "lora_A"):
                    deltas_found[layer, name] = module.get_delta_weight("default")
                continue
            module = block.mlp.experts
            while hasattr(module, "parameter_name"):
                if module.parameter_name == path.rpartition(".")[2]:
                    deltas_found[layer, name] = module.get_delta_weight("default")
                module = module.base_layer
    return {key: x.detach().double().numpy() for key, x in deltas_found.items()}


def check_deltas(peft_model, adapters, scales) -> None:
    actual_deltas, n_seen = list_deltas(peft_model), 0
    for layer, kind, pair in LAYERS:
        for name in adapters["layers"][kind]:
            want = theirs_of(name, pair, delta(adapters, kind, name, scales[name]))
            actual, n_seen = actual_deltas[layer, name], n_seen + 1
            assert actual.shape == want.shape, (layer, name)
            # 5 products at most, each and their sum rounded; then the scale
            allowed = 8 * EPS * np.abs(want).max()
            assert np.abs(actual - want).max() <= allowed, (layer, name)
            assert np.abs(want).max() > 0.01
    assert n_seen == len(actual_deltas)


def log_probs(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    merged_params = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(merged_params[:, :-1], tokens[:, 1:, None], -1)[..., 0]


def check_log_probs(hugging, setting, adapters, scales, peft_model, replaced_adapters=None) -> None:
    """Ours with merged weights, theirs through PEFT, and float64; `mine` is a mistake in ours."""
    model, cfg, params, tokens = setting
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    wide = copy.deepcopy(model).double()
    for layer, kind, pair in LAYERS:
        for name in adapters["layers"][kind]:
            module, parameter = module_and_parameter(wide, layer, name)
            add = theirs_of(name, pair, delta(adapters, kind, name, scales[name]))
            with hugging.torch.no_grad():
                getattr(module, parameter).add_(hugging.torch.tensor(add))
    oracle = log_probs(hugging.run(hugging.oracle(wide), tokens, positions)[0], tokens)
    base = log_probs(hugging.run(hugging.oracle(model), tokens, positions)[0], tokens)
    expected = log_probs(hugging.run(peft_model, tokens, positions)[0], tokens)
    tokens_BT = jnp.asarray(tokens, jnp.int32)

    @jax.jit
    def ours_of(params):
        hidden_BTD = forward(params, tokens_BT, cfg, OPS)[0]
        return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, OPS)[0]

    merged_params = jax.tree.map(
        jnp.asarray, merge_adapters(params, replaced_adapters or adapters, scales)
    )
    actual = np.asarray(ours_of(merged_params), np.float64)[:, 1:]
    allowed = 2 * np.abs(expected - oracle).max() + 2 * EPS * np.abs(oracle).max()
    error, moved = np.abs(actual - oracle).max(), np.abs(oracle - base).max()
    print(f"|dlogp| {error:.1e}, allowed {allowed:.1e}; the adapter moves them by {moved:.2g}")
    assert moved > 1000 * allowed, "the adapter must matter"
    assert error <= allowed, "ours are off"


@pytest.mark.parametrize("setting_name", SETTINGS.values(), ids=SETTINGS.keys())
def test_peft_reads_our_adapter_as_we_mean_it(hugging, peft, setting, tmp_path, setting_name):
    model, cfg, _, _ = setting
    adapters, scales = (
        random_adapters(cfg, setting_name["ranks"], size=0.05),
        scales_of(**setting_name),
    )
    save_adapter(adapters, cfg, lora_of(**setting_name), tmp_path / "a")
    assert is_same_tree(read_adapter(tmp_path / "a", cfg).adapters, adapters)
    read = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "a")
    check_deltas(read, adapters, scales)
    check_log_probs(hugging, setting, adapters, scales, read)


def test_peft_trains_on_what_we_trained_whole(hugging, peft, setting, tmp_path):
    """Its active modules hold our values, and the model gives our log-probs."""
    model, cfg, params, tokens = setting
    lora = LoraConfig(attention_rank=2, modules_to_save="router,norms,embedding,head")
    adapters = init_adapters(jax.random.key(1), cfg, lora, params)
    rng = np.random.default_rng(3)
    adapters = jax.tree.map(lambda x: x + 0.03 * rng.standard_normal(x.shape, np.float32), adapters)
    save_adapter(adapters, cfg, lora, tmp_path / "a")
    read = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "a")
    merged_params = {
        name.replace("base_model.model.", "").replace(".modules_to_save.default", ""): x
        for name, x in read.named_parameters()
        if "modules_to_save" in name
    }
    assert len(merged_params) == 4 * cfg.n_layers + 3
    actual = jax.tree.map(jnp.asarray, merge_adapters(params, adapters, lora.scales))
    save_params(actual, cfg, tmp_path / "whole", dtype="float32")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    for name, x in merged_params.items():
        assert (x.detach().numpy() == stored[name]).all(), name
    merged_model = type(model).from_pretrained(tmp_path / "whole", attn_implementation="eager")
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    expected, merged_output = (hugging.run(m, tokens, positions)[0] for m in (read, merged_model))
    base = hugging.run(model, tokens, positions)[0]
    assert np.abs(expected - merged_output).max() < 1e-3 * np.abs(expected - base).max()


@pytest.mark.parametrize(
    "setting_name", ["both", "other ranks", "stabilized", "one matrix", "attention"]
)
def test_we_read_pefts_adapter_as_it_means_it(hugging, peft, setting, tmp_path, setting_name):
    model, cfg, _, _ = setting
    ranks, options = SETTINGS[setting_name]["ranks"], SETTINGS[setting_name]
    modules = [TARGETS[n].rpartition(".")[2] for n in ranks if TARGETS[n].startswith("self")]
    parameters = [TARGETS[n] for n in ranks if TARGETS[n].startswith("mlp")]
    different = {
        TARGETS[n]: r for n, r in ranks.items() if r == 2 and setting_name == "other ranks"
    }
    config = peft.LoraConfig(
        r=max(ranks.values()),
        lora_alpha=options.get("attention_alpha", 16.0),
        target_modules=modules,
        target_parameters=parameters or None,
        use_rslora=options.get("rank_stabilized", False),
        init_lora_weights=False,
        rank_pattern=different,
        alpha_pattern=dict.fromkeys(different, 9.0),
    )
    hugging.torch.manual_seed(0)
    peft_model_made = peft.get_peft_model(copy.deepcopy(model), config)
    with hugging.torch.no_grad():  # PEFT's own are small
        for name, x in peft_model_made.named_parameters():
            if "lora_" in name:
                x.copy_(0.05 * hugging.torch.randn_like(x))
    peft_model_made.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    read_back = read_adapter(tmp_path / "a", cfg)
    assert set(read_back.scales) == set(ranks)
    assert read_back.expert_axis == (None if setting_name == "attention" else over_of(peft))
    for name, scale in scales_of(**options).items():
        assert read_back.scales[name] == pytest.approx(scale, rel=1e-12)
    check_deltas(peft_model_made, read_back.adapters, read_back.scales)
    check_log_probs(hugging, setting, read_back.adapters, read_back.scales, peft_model_made)


def test_a_run_starts_from_pefts_adapter(hugging, peft, tmp_path):
    model = hugging.model(hidden_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base", attn_implementation="eager")
    config = peft.LoraConfig(
        r=3, lora_alpha=9.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    peft_model = peft.get_peft_model(model, config)
    peft_model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    cfg = override(
        load_config("tiny_lora.py"),
        "warmup.steps=0",
        f"init.checkpoint={tmp_path / 'base'}",
        f"lora.init_from={tmp_path / 'peft'}",
        "lora.attention_rank=3",
        "lora.attention_alpha=9.0",
        "lora.expert_rank=0",
        "lora.targets=w_q,w_v",
    )
    cfg = dataclasses.replace(cfg, model=from_hf(model.config.to_dict()))
    adapters = init_run_adapters(cfg, load_params(tmp_path / "base", cfg.model, "float32"))
    check_deltas(peft_model, adapters, cfg.lora.scales)


def over_of(peft) -> str:
    """The axis that this PEFT's A is over."""
    return "out" if peft.__version__ == "0.19.0" else "in"


REFUSED = {
    "A and B of another expert": lambda a, b: (a[:, ::-1], b),
    "a rank's B of another": lambda a, b: (a, b[:, :, ::-1]),
    "gate for up": lambda a, b: (a, np.roll(b, b.shape[-1] // 2, axis=-1)),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_a_mistake_in_the_layout_would_be_seen(hugging, peft, setting, tmp_path, change):
    model, cfg, _, _ = setting
    adapters = random_adapters(cfg, {"w_gate_up": 2}, size=0.05)
    scales = scales_of({"w_gate_up": 2})
    save_adapter(adapters, cfg, lora_of({"w_gate_up": 2}), tmp_path / "a")
    read = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "a")
    wrong_adapters = {
        "layers": {
            kind: {"w_gate_up": Pair(*change(*layer["w_gate_up"]))}
            for kind, layer in adapters["layers"].items()
        }
    }
    with pytest.raises(AssertionError):
        check_deltas(read, wrong_adapters, scales)
    with pytest.raises(AssertionError, match="ours are off"):
        check_log_probs(hugging, setting, adapters, scales, read, replaced_adapters=wrong_adapters)


def test_every_peft_field_is_read_harmless_or_refused(peft, tmp_path):
    """Fields of the installed PEFT; a field that a later version adds is refused once it is set."""
    config_dict = json.loads(json.dumps(peft.LoraConfig().to_dict()))
    file = tmp_path / CONFIG
    file.write_text(json.dumps(config_dict))
    assert peft_config.read_adapter_config(tmp_path) == config_dict
    known_fields = peft_config._READ | peft_config._IGNORED
    for name in config_dict.keys() - known_fields:
        file.write_text(json.dumps(config_dict | {name: {"set": "to something"}}))
        with pytest.raises(ConfigError, match=f"{name} must be .* for jaxmoe"):
            peft_config.read_adapter_config(tmp_path)


INITS = (True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora")


@pytest.mark.parametrize("init", INITS)
def test_adapters_that_change_the_base_are_not_read(peft, tmp_path, init):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 12, bias=False))
    before = model[0].weight.detach().clone()
    lora = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=init)
    adapted = peft.get_peft_model(model, lora)
    after = adapted.base_model.model[0].base_layer.weight.detach()
    adapted.save_pretrained(tmp_path)
    if torch.equal(before, after):
        assert peft_config.read_adapter_config(tmp_path)["init_lora_weights"] == init
    else:
        with pytest.raises(ConfigError, match="init_lora_weights must be"):
            peft_config.read_adapter_config(tmp_path)
    assert torch.equal(before, after) == (init in (True, False, "gaussian", "orthogonal"))
