# SPDX-License-Identifier: Apache-2.0
"""Experts in four bits in a real vLLM: as values, and as bytes that its MXFP4 loader takes.

vLLM has no kernel that reads MXFP4 on a CPU without AMX. Its loader and our plugin run here as they
are; the product of matrices is replaced by one that decodes what the loader stored.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_weights

from jaxmoe.config import EngineError, VllmConfig
from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.model import plain_ops
from jaxmoe.model.rounded import decode_experts, round_experts
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.engine import in_process_backend
from jaxmoe.vllm.engine.vllm_engine import VllmEngine
from jaxmoe.weight_sync.files import write_files
from tests.jaxmoe.small_models import SIX_EXPERTS

pytestmark = pytest.mark.vllm

CFG = replace(SIX_EXPERTS, d_model=128, d_expert=64)
OPS, PROMPT, NEW = plain_ops(), 20, 12
FREE = Sampling(NEW, ())


def round_biases(params):
    """vLLM stores the biases of packed experts in bfloat16: biases that it holds exactly."""
    layers = {
        kind: layer
        | {
            name: layer[name].astype(jnp.bfloat16).astype(jnp.float32)
            for name in ("b_gate_up", "b_down")
        }
        for kind, layer in params["layers"].items()
    }
    return params | {"layers": layers}


def packed_weights(seed):
    return round_experts(round_biases(random_weights(CFG, seed)))


def compute_experts(self, layer, x, topk_weights, topk_ids, **_shared):
    """GPT-OSS's experts in plain torch, from the bytes in vLLM's parameters."""
    torch = importlib.import_module("torch")
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*magnitudes, *(-m for m in magnitudes)])

    def decode(blocks, scales):
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        return table[codes.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)

    w13, w2 = (
        decode(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale"))
        for name in ("w13", "w2")
    )
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(topk_weights[t], topk_ids[t].long(), strict=True):
            gate_up = w13[e] @ x[t] + layer.w13_bias[e].float()
            gate, up = gate_up[0::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
            hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            out[t] += weight * (w2[e] @ hidden + layer.w2_bias[e].float())
    return out


@pytest.fixture
def mxfp4_without_a_kernel(monkeypatch):
    """vLLM's MXFP4 method, which selects no kernel, leaves the bytes as they were loaded, and
    multiplies in plain torch; float32, which no kernel of it has."""
    module = importlib.import_module("vllm.model_executor.layers.quantization.mxfp4")
    no_kernel = module.Mxfp4MoeBackend.NONE, SimpleNamespace(is_monolithic=lambda: False)
    monkeypatch.setattr(module, "select_mxfp4_moe_backend", lambda moe: no_kernel)
    monkeypatch.setattr(module.GptOssMxfp4MoEMethod, "apply", compute_experts)
    dtypes = [importlib.import_module("torch").float32]
    monkeypatch.setattr(module.Mxfp4Config, "get_supported_act_dtypes", lambda *_: dtypes)
    monkeypatch.setattr(in_process_backend, "starts_packed", lambda *_: True)


def open_engine(tmp_path, *, four_bits=True):
    return VllmEngine(
        CFG,
        OPS,
        VllmConfig(launch=0, weights_dir=str(tmp_path)),
        work=tmp_path,
        max_prompt_tokens=PROMPT,
        max_new_tokens=NEW,
        max_rows=8,
        four_bits=four_bits,
    )


def largest_gap(engine, params):
    """max |dlogp| between the rollouts' log-probs and the trainer's forward of packed weights."""
    rng, gaps = np.random.default_rng(0), []
    prompts = [
        Prompt(i, "", tuple(rng.integers(0, CFG.vocab_size, PROMPT - i).tolist()), None)
        for i in range(4)
    ]
    for r in engine.generate(prompts, FREE, seed=1, samples=2):
        tokens = np.zeros((1, PROMPT + NEW), np.int32)
        ids = [*r.prompt.tokens, *r.tokens.tolist()]
        tokens[0, : len(ids)] = ids
        logp = np.asarray(TRAINER_LOGPS(params, jnp.asarray(tokens), cfg=CFG, ops=OPS))[0]
        gaps.append(np.abs(logp[len(r.prompt.tokens) : len(ids)] - r.rollout_logp).max())
    return max(gaps)


def test_vllm_with_decoded_experts_has_trainer_log_probs(
    tmp_path,
):
    engine = open_engine(tmp_path)
    assert engine.experts == "dense"
    for seed in (1, 2):
        params = packed_weights(seed)
        engine.load(params, seed)
        gap = largest_gap(engine, params)
        print(f"max |dlogp| {gap:.2e}")
        assert gap <= 5e-5
    engine.close()


def test_vllms_mxfp4_loader_has_the_trainers_log_probs(mxfp4_without_a_kernel, tmp_path):
    engine = open_engine(tmp_path)
    assert engine.experts == "packed"
    for seed in (1, 2):  # the second is a reload over the first
        params = packed_weights(seed)
        engine.load(params, seed)
        (state,) = engine.loaded_states()
        sent = [name for name in state["received"] if name.endswith(("_blocks", "_scales"))]
        assert state["experts"] == "mxfp4" and len(sent) == 4 * CFG.n_layers
        assert state["label"].endswith(f":{seed}") and state["stale"] == []
        gap = largest_gap(engine, params)
        print(f"max |dlogp| {gap:.2e}; unreadable {state['unreadable']}")
        assert gap <= 5e-5
    backend, params = engine.backends[0], packed_weights(3)
    with write_files(
        params, CFG, tmp_path, dtype="float32", run="ef", version=1, experts="packed"
    ) as file:  # the transport of servers
        backend.start_update()
        backend.send_update(file.update_info)
        backend.finish_update(file.label)
        (state,) = engine.loaded_states()
        assert state["received"] == file.digests and state["label"] == file.label
        assert state["stale"] == []
    # the doctor's dense arrays of the same values, and values that four bits do not hold
    engine.load(decode_experts(packed_weights(1), "float32"), 3)
    assert largest_gap(engine, packed_weights(1)) <= 5e-5
    spoilt = decode_experts(packed_weights(1), "float32")
    spoilt["layers"]["full"]["w_down"] *= 1.01
    with pytest.raises(EngineError, match="full/w_down has values that MXFP4 does not hold"):
        engine.load(spoilt, 4)
    engine.close()
