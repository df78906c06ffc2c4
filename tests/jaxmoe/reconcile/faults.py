# SPDX-License-Identifier: Apache-2.0
"""Faults of an engine, each put into peer.py or into what it returns: those that the doctor knows,
single numbers, single layers, and others that it has never heard of.

Programs here remember: faults of one seed share their tokens, so that each recomputation of them
is made once for all faults.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from random_weights import random_weights

from jaxmoe.model import plain_ops
from jaxmoe.reconcile.compare import explain_gap
from jaxmoe.reconcile.handshake import Handshake
from jaxmoe.reconcile.recompute import Programs, run_head, run_trunk
from jaxmoe.reconcile.staleness import GROUPS
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from tests.jaxmoe.reconcile.peer import (
    Peer,
    log_softmax,
    peer_logits,
    reset_peer,
    to_half,
    to_numpy,
)
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

OPS = plain_ops()
CFG = replace(SMALL, vocab_multiple=64, swiglu_limit=1.5, max_context=4096)
HALF = replace(CFG, dtype="bfloat16")
START = 5  # the token an engine may put before a prompt
COOL = Sampling(40, (), temperature=0.7)
RUN = Programs(  # what the doctor jits
    jax.jit(partial(run_trunk, ops=OPS), static_argnames="cfg"),
    jax.jit(partial(run_head, ops=OPS), static_argnames=("cfg", "top_k", "top_p")),
)
RESULTS_BY_INPUT: dict[bytes, Any] = {}


def memoize(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, once for each content of its arguments."""

    def call(*arrays: Any, **static: Any) -> Any:
        digest = hashlib.blake2b(repr((id(f), static)).encode())
        for leaf in jax.tree.leaves(arrays):
            digest.update(np.ascontiguousarray(leaf).data)
        key = digest.digest()
        if key not in RESULTS_BY_INPUT:
            RESULTS_BY_INPUT[key] = f(*arrays, **static)
        return RESULTS_BY_INPUT[key]

    return call


REMEMBERED = Programs(memoize(RUN.trunk), memoize(RUN.head))


@cache
def make_weights(seed: int):
    return random_weights(CFG, seed)


@cache
def make_older_weights(seed: int):
    """The version before: a fifth of the way to other weights."""
    return jax.tree.map(
        lambda a, b: jnp.asarray(0.8 * np.asarray(a) + 0.2 * np.asarray(b)),
        make_weights(seed),
        make_weights(seed + 50),
    )


def replace_stale(seed: int, groups: tuple[str, ...], layer: int | None = None):
    """The newest weights with some tensors of the version before."""
    names = [name for group in groups for name in GROUPS.get(group, (group,))]

    def pick_leaf(path: tuple[Any, ...], new: Any, old: Any) -> Any:
        if path[-1].key not in names:
            return new
        if layer is None:
            return old
        return old if ("sliding", "full")[layer] in str(path) else new  # two layers

    return jax.tree_util.tree_map_with_path(pick_leaf, make_weights(seed), make_older_weights(seed))


@dataclass(frozen=True)
class Fault:
    """What is wrong in the engine."""

    peer: Peer = field(default_factory=Peer)
    stale: tuple[str, ...] = ()
    layer: int | None = None  # of the stale tensors
    prompt: str = ""  # "cut" or "started"
    temperature: float = COOL.temperature
    top_k: int = 0  # the engine cuts, renormalises, and does not say so
    change_logp: Callable[[np.ndarray], np.ndarray] | None = None  # log-probs -> what it returns
    logits: Callable[[np.ndarray], np.ndarray] | None = None  # [T, V] -> those it draws from


FAULTS = {
    "prompt_end_lost": Fault(prompt="cut"),
    "prompt_start_added": Fault(prompt="started"),
    **{f"stale_{g}": Fault(stale=(g,)) for g in GROUPS},
    "stale_everything": Fault(stale=tuple(GROUPS)),
    "raw_logprobs": Fault(temperature=1.0),
    "kept_mass_missing": Fault(top_k=50),
    "router_bfloat16": Fault(Peer(half_router=True)),
    "head_bfloat16": Fault(Peer(half_head=True)),
    "logits_bfloat16": Fault(Peer(half_head=True, half_logits=True)),
    "sinks_off": Fault(Peer(sinks=False)),
    "window_off": Fault(Peer(window=0)),
    "window_minus_one": Fault(Peer(window=8)),
    "window_plus_one": Fault(Peer(window=10)),
    "softmax_before_top_k": Fault(Peer(softmax_first=True)),
    "swiglu_limit_off": Fault(Peer(limit=1e9)),
    "rope_truncate": Fault(Peer(truncate=True)),
    "rope_factor_off": Fault(Peer(factor=1.0)),
    "expert_switches": Fault(Peer(switch=0.1)),
}
LAYERS = {
    f"stale_{group}_layer_{layer}": Fault(stale=(group,), layer=layer)
    for group in ("experts", "attention", "norms", "sinks", "router")
    for layer in (0, 1)
}
TWO = {
    ("sinks_off", "window_minus_one"): Fault(Peer(sinks=False, window=8)),
    ("stale_experts", "stale_sinks"): Fault(stale=("experts", "sinks")),  # stock reload_weights
    ("raw_logprobs", "swiglu_limit_off"): Fault(Peer(limit=1e9), temperature=1.0),
}
SCALARS = {  # name, the engine's value
    **{("temperature", t): Fault(temperature=t) for t in (0.95, 0.35, 0.72, 1.4)},
    **{("rope_theta", x): Fault(Peer(theta=x)) for x in (1e4, 5e5, 1.4e5, 3e6)},
    **{("rope_factor", x): Fault(Peer(factor=x)) for x in (8.0, 40.0, 3.0)},
    **{("rms_eps", x): Fault(Peer(eps=x)) for x in (1e-6, 1e-4, 3e-3, 0.1)},
    **{("attention_scale", x): Fault(Peer(scale=x)) for x in (0.25, 0.8, 1.15, 4.0)},
    **{("swiglu_limit", x): Fault(Peer(limit=x)) for x in (0.5, 1.2, 1.9, 3.0)},
    **{("swiglu_alpha", x): Fault(Peer(alpha=x)) for x in (1.0, 1.6, 2.5)},
    **{("sink_shift", x): Fault(Peer(sink_shift=x)) for x in (-2.0, 0.1, 1.0, 3.0)},
}


def layer_of(change_tensors: Callable[[dict], None], kind: str = "sliding") -> Callable[[Any], Any]:
    """A copy of the weights with `change` done to one kind's stacked tensors."""

    def change_params(params: Any) -> Any:
        params = jax.tree.map(np.array, params)
        change_tensors(params["layers"][kind])
        return params

    return change_params


def set_tensor(name: str, index: Any, value: Any, kind: str = "sliding") -> Peer:
    def change_tensors(p: dict) -> None:
        p[name][index] = value

    return Peer(changed=layer_of(change_tensors, kind))


def add_noise(p: dict) -> None:
    rng = np.random.default_rng(3)
    for name, x in p.items():
        p[name] = (x + 1e-2 * x.std() * rng.standard_normal(x.shape)).astype(np.float32)


def flip_tensor(name: str, axis: int, parts: int) -> Callable[[dict], None]:
    """Parts of a tensor's axis in the other order, such as heads."""

    def change_tensors(p: dict) -> None:
        p[name] = np.concatenate(np.split(p[name], parts, axis=axis)[::-1], axis=axis)

    return change_tensors


def swap_tensors(a: str, b: str) -> Callable[[dict], None]:
    def change_tensors(p: dict) -> None:
        p[a], p[b] = p[b].copy(), p[a].copy()

    return change_tensors


def round_to_eighth(x: np.ndarray) -> np.ndarray:
    """Three bits of mantissa, as of an fp8."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.round(fraction * 16) / 16, exponent).astype(np.float32)


def quantise_experts(p: dict) -> None:
    for name in ("w_gate_up", "w_down"):
        p[name] = round_to_eighth(p[name])


def other_layers(params: Any) -> Any:
    kinds = params["layers"]
    return {**params, "layers": {"sliding": kinds["full"], "full": kinds["sliding"]}}


def half_embed(params: Any) -> Any:
    return {**params, "embed": to_half(params["embed"])}


def mask_low_logits(z_TV: np.ndarray) -> np.ndarray:
    """No mass on the last third of the vocabulary, of which no token is drawn here."""
    return np.where(np.arange(z_TV.shape[1]) >= 64, -1e30, z_TV)


OUTSIDE = {  # of which the doctor has no hypothesis
    "a window in full layers": Fault(Peer(full_window=9)),
    "half the window": Fault(Peer(window=5)),
    "one expert's bias zeroed in one layer": Fault(set_tensor("b_down", (0, 2), 0.0)),
    "the norms swapped": Fault(Peer(changed=layer_of(swap_tensors("attn_norm", "moe_norm")))),
    "keys one position late": Fault(Peer(key_shift=1)),
    "log-probs one token late": Fault(change_logp=lambda logp: np.roll(logp, 1)),
    "three experts, not four": Fault(Peer(active=3)),
    "five experts, not four": Fault(Peer(active=5)),
    "no router bias in one layer": Fault(set_tensor("b_router", (), 0.0, "full")),
    "one head's sink off": Fault(set_tensor("sinks", (0, 1), -1e30)),
    "one layer noised by 1e-2": Fault(Peer(changed=layer_of(add_noise, "full"))),
    "the embedding in bfloat16": Fault(Peer(changed=half_embed)),
    "the layers in another order": Fault(Peer(changed=other_layers)),
    "key and value heads in another order": Fault(Peer(changed=layer_of(flip_tensor("w_k", 2, 3)))),
    "gate and up swapped": Fault(Peer(changed=layer_of(flip_tensor("w_gate_up", 3, 2)))),
    "the router's softmax over tokens": Fault(Peer(over_tokens=True)),
    "the vocabulary's logits capped": Fault(Peer(softcap=4.0)),
    "up not clamped from below": Fault(Peer(open_below=True)),
    "an old final norm alone": Fault(stale=("final_norm",)),
    "old values and no other tensors": Fault(stale=("w_v",)),
    "experts in an fp8": Fault(Peer(changed=layer_of(quantise_experts))),
    "a third of the vocabulary masked": Fault(logits=mask_low_logits),
    "RoPE of neighbours": Fault(Peer(interleaved=True)),
    "sinks doubled": Fault(Peer(changed=layer_of(lambda p: p.update(sinks=2 * p["sinks"])))),
    "no output bias in one layer": Fault(set_tensor("b_o", (), 0.0)),
    "attention's scale in one layer": Fault(Peer(scale=0.7, scaled_layer=0)),
    "log-probs to two digits": Fault(change_logp=lambda logp: np.round(logp, 2)),
    "log-probs of base 10": Fault(change_logp=lambda logp: logp / np.log(10.0)),
    "log-probs no lower than −5": Fault(change_logp=lambda logp: np.maximum(logp, -5.0)),
    "noise of 1e-3": Fault(
        change_logp=lambda logp: logp + 1e-3 * np.sin(1e4 * logp)  # of its bits
    ),
}


def make_rollouts(fault: Fault, seed: int, dtype="float32", count=7, length=33):
    """Return the engine's rollouts of given tokens; sequences are longer than the window."""
    rng, rollouts_made = np.random.default_rng(seed), []
    params = replace_stale(seed, fault.stale, fault.layer) if fault.stale else make_weights(seed)
    params = to_numpy(params)
    for i in range(count):
        prompt, tokens = rng.integers(7, 97, 6 + i), rng.integers(7, 97, length)
        if fault.logits:
            tokens = np.minimum(tokens, 63)
        read = {"cut": prompt[:-1], "started": np.r_[START, prompt]}.get(fault.prompt, prompt)
        peer = reset_peer(replace(fault.peer, dtype=dtype))
        if fault.top_k:
            tokens = sample_tokens(params, read, length, fault.top_k, rng, dtype)
        z_TV = peer_logits(params, np.r_[read, tokens], CFG, peer)[len(read) - 1 : -1]
        z_TV = (fault.logits(z_TV) if fault.logits else z_TV) / fault.temperature
        if fault.top_k:
            z_TV = np.where(z_TV < np.sort(z_TV, axis=1)[:, -fault.top_k, None], -1e30, z_TV)
        logp = np.take_along_axis(log_softmax(z_TV), tokens[:, None], 1)[:, 0]
        experts = peer.experts[: CFG.n_layers]
        silent = fault.prompt or fault.top_k or fault.peer.active
        rollouts_made.append(
            Rollout(
                Prompt(i, "", tuple(prompt.tolist()), None),
                tokens.astype(np.int32),
                (fault.change_logp(logp) if fault.change_logp else logp).astype(np.float32),
                StopReason.MAX_TOKENS,
                np.zeros(length, np.int32),
                None,
                None if silent else np.stack(experts, axis=1)[:-1],
            )
        )
    return rollouts_made


def sample_tokens(params, read, length, top_k, rng, dtype):
    """Tokens that the engine's top-k kept, each after the ones before."""
    row = read
    for _ in range(length):
        top = np.argsort(-peer_logits(params, row, CFG, Peer(dtype))[-1])[:top_k]
        row = np.r_[row, rng.choice(top)]
    return row[len(read) :]


def make_report(fault: Fault, seed=0, cfg=CFG, run=REMEMBERED, **options):
    sampling = replace(COOL, top_k=fault.top_k)
    options_known = (
        dict(previous=make_older_weights(seed), start_id=START, handshake=Handshake(cfg.dtype))
        | options
    )
    rollouts_made = make_rollouts(fault, seed, cfg.dtype)
    return explain_gap(rollouts_made, make_weights(seed), cfg, sampling, run=run, **options_known)


def name_faults(r):
    """Names where the doctor gives one, or the kind of its verdict."""
    v = r.verdict
    return tuple(f.name for f in v.faults) if v.kind == "named" else (v.kind,)


def print_matrix(title, matrix):
    print(f"\n{title}")
    for fault, r in matrix.items():
        v, unit = r.verdict, r.rounding.unit
        description = " + ".join(
            f.name + (f" {f.value:.5g} ± {f.spread:.0e}" if f.spread else "") for f in v.faults
        )
        print(
            f"  {fault!s:38} {v.kind:11} {description:44} gap {v.gap:.1e}  left {v.remaining:.1e} "
            f"({v.remaining / unit:.1f} × rounding){' also ' if v.also else ''}{', '.join(v.also)}"
        )
