# SPDX-License-Identifier: Apache-2.0
"""Every fault of an engine is named, from its numbers alone; what is no fault is not.

The engine is peer.py: numpy, no code of ours, with the fault inside.
"""

from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer import Peer, fresh, log_softmax, logits
from random_weights import random_weights

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.observe.profiling import compilations
from jaxmoe.reconcile.checks import run_checks
from jaxmoe.reconcile.compare import reconcile
from jaxmoe.reconcile.hypotheses import GROUPS
from jaxmoe.reconcile.recompute import Programs, head, trunk
from jaxmoe.reconcile.variants import sampled_rows, unchanged
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason

OPS = plain_ops()
CFG = ModelConfig(
    vocab_size=97, d_model=48, n_layers=2, n_q_heads=6, n_kv_heads=3, head_dim=16, n_experts=7,
    experts_per_token=4, d_expert=40, sliding_window=9, dtype="float32", vocab_multiple=64,
    swiglu_limit=1.5, max_context=4096,
)  # fmt: skip
HALF = replace(CFG, dtype="bfloat16")
START = 5  # the token an engine may put before a prompt


def programs():
    """What the doctor jits."""
    return Programs(
        jax.jit(partial(trunk, ops=OPS), static_argnames="cfg"),
        jax.jit(partial(head, ops=OPS), static_argnames=("cfg", "top_k", "top_p")),
    )


RUN = programs()
COOL = Sampling(40, (), temperature=0.7)


@cache
def weights(seed):
    return random_weights(CFG, seed)


@cache
def older(seed: int):
    """The version before: a fifth of the way to other weights."""
    return jax.tree.map(
        lambda a, b: jnp.asarray(0.8 * np.asarray(a) + 0.2 * np.asarray(b)),
        weights(seed), weights(seed + 50),
    )  # fmt: skip


def stale(seed: int, *groups: str):
    """The newest weights with some tensors of the version before."""
    names = [name for group in groups for name in GROUPS[group]]

    def pick(path, new, old):
        return old if path[-1].key in names else new

    return jax.tree_util.tree_map_with_path(pick, weights(seed), older(seed))


@dataclass(frozen=True)
class Fault:
    """What is wrong in the engine."""

    peer: Peer = field(default_factory=Peer)
    stale: tuple[str, ...] = ()
    prompt: str = ""  # "cut" or "started"
    raw: bool = False
    top_k: int = 0  # the engine cuts, renormalises, and does not say so


FAULTS = {
    "prompt_end_lost": Fault(prompt="cut"),
    "prompt_start_added": Fault(prompt="started"),
    **{f"stale_{g}": Fault(stale=(g,)) for g in GROUPS},
    "stale_everything": Fault(stale=tuple(GROUPS)),
    "raw_logprobs": Fault(raw=True),
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
TWO = {
    ("sinks_off", "window_minus_one"): Fault(Peer(sinks=False, window=8)),
    ("stale_experts", "stale_sinks"): Fault(stale=("experts", "sinks")),  # stock reload_weights
    ("raw_logprobs", "swiglu_limit_off"): Fault(Peer(limit=1e9), raw=True),
}
UNLISTED = {
    "another alpha": Fault(Peer(alpha=1.0)),
    "a window in full layers": Fault(Peer(full_window=9)),
    "half the window": Fault(Peer(window=5)),
}


def rollouts(fault: Fault, seed: int, dtype="float32", count=7, length=33):
    """What the engine says of given tokens; sequences longer than the window."""
    rng, made = np.random.default_rng(seed), []
    params = stale(seed, *fault.stale) if fault.stale else weights(seed)
    for i in range(count):
        prompt, tokens = rng.integers(7, 97, 6 + i), rng.integers(7, 97, length)
        read = {"cut": prompt[:-1], "started": np.r_[START, prompt]}.get(fault.prompt, prompt)
        peer = fresh(replace(fault.peer, dtype=dtype))
        if fault.top_k:
            tokens = drawn(params, read, length, fault.top_k, rng, dtype)
        z_TV = logits(params, np.r_[read, tokens], CFG, peer)[len(read) - 1 : -1]
        z_TV = z_TV / (1.0 if fault.raw else COOL.temperature)
        if fault.top_k:
            z_TV = np.where(z_TV < np.sort(z_TV, axis=1)[:, -fault.top_k, None], -1e30, z_TV)
        logp = np.take_along_axis(log_softmax(z_TV), tokens[:, None], 1)[:, 0]
        seen = peer.experts[: CFG.n_layers]
        routed = None if fault.prompt or fault.top_k else np.stack(seen, axis=1)[:-1]
        made.append(Rollout(
            Prompt(i, "", tuple(prompt.tolist()), None), tokens.astype(np.int32),
            logp.astype(np.float32), StopReason.MAX_TOKENS, np.zeros(length, np.int32), None,
            routed,
        ))  # fmt: skip
    return made


def drawn(params, read, length, top_k, rng, dtype):
    """Tokens that the engine's top-k kept, each after the ones before."""
    row = read
    for _ in range(length):
        best = np.argsort(-logits(params, row, CFG, Peer(dtype))[-1])[:top_k]
        row = np.r_[row, rng.choice(best)]
    return row[len(read) :]


def report(fault: Fault, seed=0, cfg=CFG, **options):
    sampling = replace(COOL, top_k=fault.top_k)
    known = dict(previous=older(seed), start_id=START, engine_dtype=cfg.dtype) | options
    made = rollouts(fault, seed, cfg.dtype)
    return reconcile(made, weights(seed), cfg, sampling, run=RUN, **known)


def named(r):
    return tuple(f.name for f in r.verdict.faults) or (r.verdict.kind,)


def show(title, matrix):
    print(f"\n{title}")
    for fault, (verdict, v) in matrix.items():
        print(f"  {fault:28} {' + '.join(verdict):40} gap {v.gap:.1e}  left {v.left:.1e}")


def test_unchanged_it_is_the_trainer():
    made = rollouts(Fault(), 0)
    rows = sampled_rows(made, CFG)
    v = unchanged(weights(0), CFG, COOL, rows)
    tokens, segments = jnp.asarray(rows.tokens_BT), jnp.asarray(rows.segments_BT)
    own = jnp.full_like(jnp.asarray(rows.replay_LBTA), -1)
    hidden, experts, margin, regret = RUN.trunk(v.params, tokens, segments, own, v.knobs, cfg=CFG)
    ours, _, kept = RUN.head(
        v.params, hidden, tokens, v.knobs, cfg=replace(CFG, sliding_window=1), top_k=0, top_p=1.0
    )

    @jax.jit
    def trainer(params):
        hidden, _, chosen = forward(params, tokens, CFG, OPS, segment_ids_BT=segments)
        return sequence_logprobs(params, hidden, tokens, CFG, OPS, temperature=0.7)[0], chosen

    logp, chosen = trainer(weights(0))
    gap = np.abs(np.asarray(ours) - np.asarray(logp))[rows.sampled_BT]
    assert gap.max() <= 64 * np.finfo(np.float32).eps
    np.testing.assert_array_equal(experts, chosen)
    assert float(np.abs(kept).max()) == 0.0
    assert float(regret.max()) == 0.0 < float(margin.min())


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_every_fault_is_named_in_float32(seed):
    matrix = {}
    for name, fault in FAULTS.items():
        r = report(fault, seed)
        matrix[name] = named(r), r.verdict
    show(f"float32, seed {seed}", matrix)
    assert {name: verdict for name, (verdict, _) in matrix.items()} == {n: (n,) for n in FAULTS}


@pytest.mark.slow
def test_faults_above_rounding_are_named_in_bfloat16():
    """The peer rounds elsewhere than we do: what is smaller than that is not to be seen."""
    matrix, small = {}, []
    for name, fault in FAULTS.items():
        r = report(fault, 0, HALF)
        matrix[name] = named(r), r.verdict
        if r.verdict.gap <= 2 * r.rounding.engine:
            small.append(name)
    show("bfloat16", matrix)
    print("  below rounding:", ", ".join(small))
    assert len(small) <= 9
    for name, (verdict, _) in matrix.items():
        assert verdict in (((name,), ("agree",)) if name in small else ((name,),)), name


def test_two_faults_are_both_named():
    for names, fault in TWO.items():
        assert set(named(report(fault, 0))) == set(names)


def test_a_fault_outside_the_list_is_unexplained_and_not_another():
    for seed in (0,):
        for name, fault in UNLISTED.items():
            r = report(fault, seed)
            assert named(r) == ("unexplained",), (name, named(r))
            assert r.verdict.ranked and not r.agrees


@pytest.mark.parametrize("cfg", [CFG, pytest.param(HALF, marks=pytest.mark.slow)])
def test_without_a_fault_they_agree(cfg):
    for seed in (0, 1, 2) if cfg is CFG else (0,):
        r = report(Fault(), seed, cfg)
        assert named(r) == ("agree",) and r.agrees
        assert all(x.regret <= 1e-5 for x in r.layers) or cfg is HALF


def test_an_engine_in_bfloat16_is_named_beside_a_trainer_in_float32():
    made = rollouts(Fault(), 0, "bfloat16")
    r = reconcile(made, weights(0), CFG, COOL, run=RUN, engine_dtype="bfloat16")
    assert named(r) == ("all_bfloat16",)
    assert "in size" in r.verdict.why


def test_a_fault_is_seen_behind_an_engine_in_bfloat16():
    made = rollouts(Fault(Peer(sinks=False)), 0, "bfloat16")
    r = reconcile(made, weights(0), CFG, COOL, run=RUN, engine_dtype="bfloat16")
    assert named(r) == ("sinks_off", "all_bfloat16")


def test_few_programs_are_compiled():
    report(FAULTS["window_off"])
    before = compilations(RUN.trunk), compilations(RUN.head)
    report(FAULTS["sinks_off"])
    report(FAULTS["stale_router"])
    assert (compilations(RUN.trunk), compilations(RUN.head)) == before  # a window is one more
    assert before[0] <= 8


def test_too_few_tokens_are_refused():
    made = rollouts(Fault(), 0, count=1, length=8)
    with pytest.raises(ConfigError, match="at least 32 sampled tokens"):
        reconcile(made, weights(0), CFG, COOL, run=RUN)


def test_the_worst_tokens_and_layers_are_shown():
    r = report(Fault(Peer(switch=0.1)), 0)
    gaps = [abs(t.engine - t.trainer) for t in r.worst]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] == pytest.approx(
        r.metrics["train_rollout_logprob_abs_diff_max"], rel=1e-5
    )
    assert [x.layer for x in r.layers] == [0, 1]
    assert all(0.05 < x.switched_here < 0.2 for x in r.layers)
    assert r.replayed is not None and r.replayed < 1e-4 * r.verdict.gap


def test_checks_name_what_needs_no_recomputation():
    made = rollouts(Fault(), 0, count=2)
    made = [replace(r, prompt=replace(r.prompt, text="ab")) for r in made]

    def found(rollouts=made, encode=lambda prompt: made[0].prompt.tokens, **options):
        return [f.name for f in run_checks(rollouts[:1], COOL, 97, 0, encode=encode, **options)]

    assert found() == []
    assert found(encode=lambda prompt: [1, 2]) == ["tokeniser_own"]
    assert found(their_encode=lambda prompt: [0, *made[0].prompt.tokens]) == ["tokeniser_engine"]
    old = [replace(made[0], weight_versions=np.full(33, 3, np.int32))]
    assert found(old) == ["version"]
    high = [replace(made[0], tokens=np.r_[99, made[0].tokens[1:]])]
    assert found(high) == ["unknown_ids"]
    stop = replace(COOL, stop_ids=(int(made[0].tokens[4]),))
    encode = lambda prompt: made[0].prompt.tokens  # noqa: E731
    assert [f.name for f in run_checks(made[:1], stop, 97, 0, encode=encode)] == ["stop_ids"]
    loaded = {"stale": ["model.norm.weight"], "received": {"lm_head.weight": "aa"}}
    assert found(loaded=loaded) == ["stale_tensors"]
    assert found(loaded=loaded | {"stale": []}, expected={"lm_head.weight": "bb"}) == [
        "stale_tensors"
    ]
    assert found(loaded=loaded | {"stale": []}, expected={"lm_head.weight": "aa"}) == []
