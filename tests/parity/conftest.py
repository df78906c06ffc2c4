# SPDX-License-Identifier: Apache-2.0
"""Random GPT-OSS models of `transformers` whose routing no rounding can change, and oss-harmony."""

import dataclasses
import types
import typing

import numpy as np
import pytest

from jaxmoe.data.tokenizer import ByteTokenizer

E, D = 7, 48


@dataclasses.dataclass(frozen=True)
class Hugging:
    """What the tests take from torch and transformers, imported only when one runs."""

    torch: types.ModuleType
    transformers: types.ModuleType
    model: types.FunctionType
    run: types.FunctionType
    oracle: types.FunctionType


@pytest.fixture(scope="session")
def hugging():
    torch, transformers = (
        pytest.importorskip(name, reason=f"compares with {name}: pip install -e '.[parity]'")
        for name in ("torch", "transformers")
    )
    torch.set_num_threads(1)
    return Hugging(torch, transformers, make_model, run, oracle)


class HarmonyTokenizer(ByteTokenizer):
    """GPT-OSS's tokenizer, as oss-harmony has it built in."""

    encoding: typing.Any
    specials: dict[str, int]

    def __init__(self, encoding):
        specials = {
            name: encoding.encode(name, allowed_special="all")[0]
            for name in encoding.special_tokens_set
        }
        self.__dict__.update(
            encoding=encoding,
            specials=specials,
            vocab_size=201_088,
            stop_ids=(specials["<|return|>"], specials["<|call|>"]),
        )

    def encode(self, text, *, specials=False):
        allowed = {"allowed_special": "all"} if specials else {"disallowed_special": ()}
        return self.encoding.encode(text, **allowed)

    def decode(self, ids):
        return self.encoding.decode(list(ids))

    def special(self, name):
        return self.specials[name]


@dataclasses.dataclass(frozen=True)
class Harmony:
    """oss-harmony's module, its encoding of GPT-OSS, and the tokenizer of that encoding."""

    module: types.ModuleType
    encoding: typing.Any
    tokenizer: HarmonyTokenizer


@pytest.fixture(scope="session")
def harmony():
    module = pytest.importorskip("openai_harmony", reason="pip install -e '.[parity]'")
    encoding = module.load_harmony_encoding(module.HarmonyEncodingName.HARMONY_GPT_OSS)
    return Harmony(module, encoding, HarmonyTokenizer(encoding))


def make_model(seed: int = 0, **changes):
    """A float32 GptOssForCausalLM, every tensor random, every value exact in bfloat16.

    Each token's embedding carries a code of large ±1s in its first E entries and each router
    reads the code (in its own order), so top-k margins are wide in any dtype; blocks write
    little there. Pre-activations pass both SwiGLU limits, sinks lie in [5, 20]: the
    sizes of trained weights, not of fresh ones, or a wrong term would pass unseen.
    """
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = dict(
        vocab_size=97,
        hidden_size=D,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        num_local_experts=E,
        num_experts_per_tok=4,
        intermediate_size=40,
        sliding_window=9,
        max_position_embeddings=131_072,
    )
    config = GptOssConfig(**{**sizes, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = GptOssForCausalLM(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = _random_tensor(rng, name, tuple(parameter.shape))
            parameter.copy_(torch.tensor(value, dtype=torch.float32).bfloat16().float())
    return model


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    if name.endswith("sinks"):
        return rng.uniform(5, 20, shape)
    if "norm" in name:
        return 1 + 0.2 * x
    if name.endswith("embed_tokens.weight"):
        code = rng.permuted(np.tile(np.where(np.arange(E) < 4, 12.0, -12.0), (shape[0], 1)), axis=1)
        x[:, :E] = code
        return x
    if name.endswith("router.weight"):
        x *= 0.05
        x[np.arange(E), rng.permutation(E)] += 2
        return x
    wide = {"gate_up_proj": 0.4, "q_proj": 0.3, "k_proj": 0.3, "v_proj": 0.2, "o_proj": 0.2}
    width = next((value for key, value in wide.items() if key in name), 0.1)
    x *= 0.3 if name.endswith("bias") else width
    if "down_proj" in name:  # the code is along the last axis
        x[..., :E] *= 0.1
    if "o_proj" in name:  # … and along the first
        x[:E] *= 0.1
    return x


def oracle(model):
    """The model in float64, its float32 casts undone; angles stay float32, as they are defined."""
    import copy

    import torch

    model = copy.deepcopy(model).double()
    for module in model.modules():
        kind = type(module).__name__
        if kind == "GptOssRMSNorm":
            module.forward = types.MethodType(_wide_norm, module)
        if kind == "GptOssRotaryEmbedding":
            inverse = model_inverse_frequencies(model)

            def tables(x, positions, inverse=inverse, scale=module.attention_scaling):
                angles = (positions[..., None].float() * inverse).double()
                return angles.cos() * scale, angles.sin() * scale

            module.forward = tables
    assert next(model.parameters()).dtype == torch.float64
    return model


def model_inverse_frequencies(model):
    return model.model.rotary_emb.inv_freq.float()


def _wide_norm(self, x):
    scale = (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    return self.weight * (x * scale)


def run(model, tokens_BT, positions_BT, weights_BT=None):
    """(logits [B, T, V], experts [L, B, T, A] sorted, {name: gradient of Σ weights·logp})."""
    import torch

    tokens, positions = (
        torch.tensor(np.asarray(x), dtype=torch.long) for x in (tokens_BT, positions_BT)
    )
    out = model(
        input_ids=tokens,
        position_ids=positions,
        use_cache=False,
        output_router_logits=weights_BT is not None,
    )
    logits = out.logits
    if weights_BT is None:
        return logits.detach().double().numpy(), None, {}
    chosen = np.stack(
        [np.sort(r.detach().topk(4, dim=-1).indices.numpy()) for r in out.router_logits]
    ).reshape(-1, *tokens.shape, 4)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp = wide[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    model.zero_grad()
    (logp * torch.tensor(np.asarray(weights_BT)[:, 1:], dtype=logp.dtype)).sum().backward()
    grads = {name: p.grad.double().numpy() for name, p in model.named_parameters()}
    return logits.detach().double().numpy(), chosen, grads
