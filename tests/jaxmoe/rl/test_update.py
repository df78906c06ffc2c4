# SPDX-License-Identifier: Apache-2.0
"""RL's step: one update however the batch is cut, packed, padded or spread; one compilation."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import (
    Config,
    CriticConfig,
    DataConfig,
    GateConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
)
from jaxmoe.losses import (
    cispo_terms,
    clipped_terms,
    fixed_length_weights,
    gae,
    geometric_is,
    gspo_terms,
    kept_token_mean_weights,
    kl_k1,
    normalize,
    reinforce_pp_advantages,
    reinforce_terms,
    rejection,
    rloo_advantages,
    sequence_is,
    sequence_mean_weights,
    token_is,
    veto,
)
from jaxmoe.model import init_params, new_critic, sequence_values
from jaxmoe.observe.profiling import compilations
from jaxmoe.rl.algorithm import Algorithm, check
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.minibatches import divide
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import critic_of, new_state, policy_of
from jaxmoe.rl.step import batch_logprobs, in_rows
from jaxmoe.rl.update import OPEN, UNSEEN, Scorer, estimated, one_update, rl_step, scored

EPS = float(np.finfo(np.float32).eps)
CFG = ModelConfig(
    vocab_size=29, d_model=24, n_layers=2, n_q_heads=6, n_kv_heads=3, head_dim=8, n_experts=5,
    experts_per_token=2, d_expert=20, sliding_window=5, dtype="float32",
)  # fmt: skip
B, T, R = 8, 12, 4
ENDS = np.array([12, 9, 6, 11, 7, 5, 12, 8])
SGD = optax.sgd(1.0)  # the update is minus the gradient
MODEL = init_params(jax.random.key(0), CFG)
PARAMS = {"embed": 8 * MODEL["embed"], "head": MODEL["head"]}


@dataclass(frozen=True)
class Bigram(Scorer):
    """A model without layers, which compiles in no time: each token knows the one before it."""

    def policy(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        policy = policy_of(params)
        hidden_BTD = jnp.tanh(policy["embed"][rows.tokens_BT])
        logp_BT, entropy_BT = batch_logprobs(policy, batch, model=self.model, hidden_BTD=hidden_BTD)
        out = {"logp_BT": logp_BT, "entropy_BT": entropy_BT}
        if self.critic == "shared":
            values_BT = sequence_values(critic_of(params), hidden_BTD)
            out["values_BT"] = in_rows(values_BT, batch)
        return out

    def values(self, params, batch):
        rows, critic = batch if batch.packed is None else batch.packed, critic_of(params)
        hidden_BTD = jnp.tanh(critic["backbone"]["embed"][rows.tokens_BT])
        return {"values_BT": in_rows(sequence_values(critic, hidden_BTD), batch)}


def make_batch(extra=0, shift=0.0):
    """Rows of 5 to 12 tokens in groups of 4, padded on the right by `extra` more columns."""
    rng = np.random.default_rng(0)
    time, ends = np.arange(T)[None, :], ENDS[:, None]
    mask = (time >= 3) & (time < ends) & (time != 5)  # column 5 is a tool's

    def widen(x):
        return np.pad(x, ((0, 0), (0, extra)))

    length = T + extra
    return Batch(
        tokens_BT=widen(np.where(time < ends, rng.integers(0, 29, (B, T)), 0).astype(np.int32)),
        positions_BT=np.broadcast_to(np.arange(length, dtype=np.int32), (B, length)),
        segment_ids_BT=widen((time < ends).astype(np.int32)),
        loss_mask_BT=widen(mask),
        rollout_logp_BT=widen(
            np.where(mask, -3.4 + shift + 0.3 * rng.normal(size=(B, T)), 0.0).astype(np.float32)
        ),
        rewards_B=rng.normal(size=B).astype(np.float32),
        group_ids_B=np.repeat(np.arange(B // R, dtype=np.int32), R),
        weights_version_B=np.zeros(B, np.int32),
    )


def start(a, tx=SGD, params=PARAMS):
    if a.critic != "none":
        critic = new_critic(params, CFG, "float32", own_backbone=a.critic == "own")
        # a head of zeros would send nothing to the backbone
        critic["value_head"]["w_value"] = jnp.sin(jnp.arange(CFG.d_model, dtype=jnp.float32))
        params = {"policy": params, "critic": critic}
    return new_state(params, tx)


def step_of(a, *, tx=SGD, scorer=None, **options):
    scorer = scorer or Bigram(CFG, critic=a.critic)
    return jax.jit(partial(rl_step, tx=tx, algorithm=a, scorer=scorer, **options))


def algorithm(**fields):
    made = Algorithm(samples_per_prompt=R, **fields)
    check(made)
    return made


ALGORITHMS = {
    "gspo, recomputed, kl in the loss": dict(
        objective=partial(gspo_terms, clip_low=0.1, clip_high=0.2), mean=sequence_mean_weights,
        old_logp="recomputed", correction=(partial(sequence_is, high=2.0), normalize),
        kl_coef=0.1, entropy_coef=0.02,
    ),
    "ppo, shared critic, detached": dict(
        advantages=partial(gae, trace=0.9), critic="shared", value_clip=0.01,
        correction=(geometric_is, partial(veto, high=3.0)),
    ),
    "reinforce++, kl in the reward": dict(
        objective=reinforce_terms, advantages=reinforce_pp_advantages, kl=kl_k1, kl_coef=0.1,
        kl_in="reward", old_logp="recomputed", mean=kept_token_mean_weights,
        correction=(partial(rejection, by="seq_mean_k3", high=0.3), token_is),
    ),
    "grpo": {},
    "dr_grpo": dict(advantages=rloo_advantages, mean=partial(fixed_length_weights, length=9)),
    "ppo anchored at the rollout": dict(
        objective=partial(clipped_terms, dual_clip=1.5), old_logp="rollout",
        correction=(partial(rejection, by="token_k1", low=0.5, high=2.0),),
    ),
    "cispo": dict(objective=cispo_terms, mean=sequence_mean_weights),
    "ppo, own critic": dict(advantages=gae, critic="own"),
}  # fmt: skip
GPT_OSS = "gspo, of the model itself"


def reference_of(a, params=PARAMS):
    return jax.tree.map(lambda x: 1.1 * x, params) if a.kl_coef else None


@dataclass(frozen=True)
class Case:
    """An algorithm, its step, its update of a batch, and how far another order may be."""

    a: Algorithm
    scorer: Scorer
    params: dict
    step: Any
    want: tuple
    bound: dict

    def start(self):
        return start(self.a, params=self.params)

    def run(self, batch, step=None):
        reference = reference_of(self.a, self.params)
        return (step or self.step)(self.start(), batch, None, reference)

    def same(self, state, metrics):
        want, said = self.want

        def near(path, ours, theirs, most):
            worst = float(np.max(np.abs(np.asarray(ours) - np.asarray(theirs))))
            assert worst <= most, f"{jax.tree_util.keystr(path)}: {worst} > {most}"

        jax.tree_util.tree_map_with_path(near, state.params, want.params, self.bound)
        assert metrics.keys() == said.keys()
        for name, value in said.items():
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


@pytest.fixture(scope="module", params=[*ALGORITHMS, GPT_OSS])
def plain(request):
    """A case for each algorithm, and one with the real model.

    n terms added in any two orders differ by at most n·eps·Σ|term|; for Σ|term| stands B·T times
    the largest entry of the parameter's gradient, and the rounding of the update itself.
    """
    real = request.param == GPT_OSS
    a = algorithm(**ALGORITHMS[next(iter(ALGORITHMS)) if real else request.param])
    scorer, params = (Scorer(CFG), MODEL) if real else (Bigram(CFG, critic=a.critic), PARAMS)
    before, step = start(a, params=params), step_of(a, scorer=scorer)
    after, metrics = step(before, make_batch(), None, reference_of(a, params))
    size = jax.tree.map(lambda p, q: float(jnp.max(jnp.abs(p - q))), before.params, after.params)
    assert sum(jax.tree.leaves(size)) > 0
    bound = jax.tree.map(
        lambda s, p: EPS * (B * T * s + 4 * float(jnp.max(jnp.abs(p)))), size, before.params
    )
    return Case(a, scorer, params, step, (after, metrics), bound)


def test_the_update_does_not_depend_on_microbatches(plain):
    step = step_of(plain.a, scorer=plain.scorer, microbatches=4)
    plain.same(*plain.run(make_batch(), step))


def test_the_update_does_not_depend_on_packing(plain):
    batch, minibatches = divide(make_batch(), plain.a, seed=(0,), tokens_per_microbatch=2 * T)
    assert minibatches is None and int(batch.packing.count) == 4
    plain.same(*plain.run(batch))


def test_the_update_does_not_depend_on_padding(plain):
    plain.same(*plain.run(make_batch(extra=5)))


def test_the_update_does_not_depend_on_the_number_of_devices(plain):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(make_batch(), NamedSharding(mesh, P("data")))
    reference = reference_of(plain.a, plain.params)
    state, reference = jax.device_put((plain.start(), reference), NamedSharding(mesh, P()))
    after, metrics = plain.step(state, batch, None, reference)
    assert metrics["loss"].sharding.num_devices == 4
    plain.same(after, metrics)


def test_shuffled_rows_of_one_minibatch_are_the_whole_batch():
    a = algorithm(old_logp="recomputed", epochs=2)
    one = algorithm(old_logp="recomputed")
    batch, minibatches = divide(make_batch(), a, seed=(3,))
    assert sorted(minibatches.rows_UB[0]) == list(range(B))
    assert minibatches.rows_UB[0].tolist() != minibatches.rows_UB[1].tolist()
    still, metrics = step_of(a, tx=optax.sgd(0.0))(start(a), batch, minibatches)
    _, want = step_of(one, tx=optax.sgd(0.0))(start(one), make_batch())
    for name, value in want.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    assert int(still.step) == 2


def test_minibatches_are_updates_one_after_the_other():
    a = algorithm(old_logp="recomputed", minibatches=2, correction=(token_is,))
    batch, minibatches = divide(make_batch(), a, seed=(1,))
    after, metrics = step_of(a)(start(a), batch, minibatches)
    # by hand: advantages and old log-probs of the whole batch, then the two halves in turn
    scorer = Bigram(CFG)
    whole = jax.tree.map(jnp.asarray, batch)
    ready = estimated(scored(PARAMS, None, whole, a, scorer, 1, policy=True), a)
    state, norms, least = start(a), [], []
    for rows in minibatches.rows_UB:
        half = jax.tree.map(lambda x, rows=rows: x[rows], ready)
        state, said = one_update(
            state,
            half,
            tx=SGD,
            algorithm=a,
            scorer=scorer,
            gate=OPEN,
            seen=UNSEEN,
            microbatches=1,
        )
        norms.append(float(said["grad/norm"]))
        least.append(float(said["rollout_corr/rollout_is_min"]))
    assert least[0] != least[1]
    assert float(metrics["rollout_corr/rollout_is_min"]) == pytest.approx(min(least), rel=1e-4)
    assert float(metrics["grad/norm"]) == pytest.approx(np.mean(norms), rel=1e-5)
    for ours, want in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(ours, want, rtol=1e-4, atol=2e-6)
    assert float(metrics["policy/ratio_max"]) > 1.0  # the second half is off-policy


def test_packed_minibatches_of_any_length_compile_once():
    a = algorithm(old_logp="recomputed", minibatches=2)
    step, counts = step_of(a), set()
    for cut in (0, 3):
        batch = make_batch()
        segments = np.where(np.arange(T)[None] < ENDS[:, None] - cut, batch.segment_ids_BT, 0)
        batch = replace(
            batch, segment_ids_BT=segments.astype(np.int32),
            loss_mask_BT=batch.loss_mask_BT & (segments > 0),
        )  # fmt: skip
        batch, minibatches = divide(batch, a, seed=(cut,), tokens_per_microbatch=2 * T)
        counts.add(int(batch.packing.count))
        step(start(a), batch, minibatches)
    assert len(counts) == 2 and compilations(step) == 1


@dataclass(frozen=True)
class TwoFaced(Scorer):
    """A model whose first forward routes by another router than its second: rounding, enlarged."""

    noise: float = 0.5

    def policy(self, params, batch):
        calls.append(1)
        if len(calls) % 2 == 1:
            params = jax.tree_util.tree_map_with_path(
                lambda path, x: x + self.noise * jnp.cos(jnp.arange(x.size, dtype=x.dtype))
                .reshape(x.shape) if "w_router" in jax.tree_util.keystr(path) else x, params,
            )  # fmt: skip
        return super().policy(params, batch)


calls: list[int] = []


def test_detached_the_ratio_is_one_where_two_forwards_route_differently():
    calls.clear()
    recomputed = algorithm(old_logp="recomputed")
    _, apart = step_of(recomputed, scorer=TwoFaced(CFG))(
        start(recomputed, params=MODEL), make_batch()
    )
    assert abs(float(apart["policy/ratio_mean"]) - 1.0) > 1e-4
    assert float(apart["policy/clip_frac"]) > 0.0 and float(apart["policy/kl_old"]) > 1e-3
    detached = algorithm()
    _, one = step_of(detached, scorer=TwoFaced(CFG))(start(detached, params=MODEL), make_batch())
    assert float(one["policy/ratio_mean"]) == 1.0 and float(one["policy/ratio_max"]) == 1.0
    assert float(one["policy/clip_frac"]) == 0.0 and float(one["policy/kl_old"]) == 0.0
    assert len(calls) >= 3 and float(one["grad/norm"]) > 0.0


def test_recomputed_without_noise_is_the_detached_update():
    detached, recomputed = algorithm(), algorithm(old_logp="recomputed")
    ours, _ = step_of(recomputed)(start(recomputed), make_batch())
    want, _ = step_of(detached)(start(detached), make_batch())
    for x, y in zip(jax.tree.leaves(ours.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


GATED = {
    "detached": {}, "several updates": dict(old_logp="rollout", minibatches=2),
}  # fmt: skip


@pytest.mark.parametrize("shift, closed", [(0.0, False), (6.0, True)])
@pytest.mark.parametrize("name, bound", [(n, b) for n in GATED for b in ("abs_diff", "k3")])
def test_the_gate_leaves_the_state_bit_for_bit(shift, closed, name, bound):
    a, tx = algorithm(**GATED[name]), optax.adam(1e-2)
    batch, minibatches = divide(make_batch(shift=shift), a, seed=(0,))
    if name != "detached":  # one half is as it should be: the batch is held back all the same
        good = np.isin(np.arange(B), minibatches.rows_UB[0])[:, None]
        half = np.where(good, make_batch().rollout_logp_BT, batch.rollout_logp_BT)
        batch = replace(batch, rollout_logp_BT=half)
    before, gate = start(a, tx), GateConfig(**{bound: 1.5})
    step = step_of(a, tx=tx, gate=gate)
    rows = jax.tree.map(jnp.asarray, make_batch())
    logp_BT = Bigram(CFG).policy(before.params, rows)["logp_BT"]
    gap = np.abs(np.asarray(logp_BT) - batch.rollout_logp_BT)[batch.loss_mask_BT].mean()
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        after, metrics = step(before, batch, minibatches)
    assert float(metrics["gate/closed"]) == float(closed)
    np.testing.assert_allclose(metrics["gate/abs_diff"], gap, rtol=1e-5)
    same_bits = [
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    assert all(same_bits) if closed else not all(same_bits)


def test_the_gate_reads_the_effective_sample_size():
    a, batch = algorithm(), make_batch()
    wild = np.where(np.arange(T) == 3, -18.0, batch.rollout_logp_BT).astype(np.float32)
    _, metrics = step_of(a, gate=GateConfig(ess=0.3))(
        start(a), replace(batch, rollout_logp_BT=wild)
    )
    assert float(metrics["rollout_corr/ess"]) < 0.3 and float(metrics["gate/closed"]) == 1.0


def test_the_policy_stands_still_while_the_critic_is_pretrained():
    cfg = Config(
        model=CFG, data=DataConfig(task="x", max_prompt_tokens=6), steps=5,
        rollout=RolloutConfig(sequences_per_step=B, samples_per_prompt=R, max_new_tokens=6),
        optim=OptimConfig(lr=1e-2, weight_decay=0.1),
        critic=CriticConfig(backbone="own", lr=1e-2, pretrain_steps=2),
    )  # fmt: skip
    a, tx = algorithm(advantages=gae, critic="own", value_clip=1e9), rl_optimizer(cfg)
    state, step, losses = start(a, tx), step_of(a, tx=tx), []
    for i in range(1, 5):
        held = policy_of(state.params)
        with jax.numpy_dtype_promotion("standard"):
            state, metrics = step(state, make_batch())
        losses.append(float(metrics["critic/loss"]))
        moved = any(
            not np.array_equal(x, y)
            for x, y in zip(
                jax.tree.leaves(held), jax.tree.leaves(policy_of(state.params)), strict=True
            )
        )
        assert moved == (i > 2), i
    assert losses[-1] < losses[0]
    assert critic_of(state.params).keys() == {"value_head", "backbone"}


def test_a_shared_critic_reaches_the_policys_layers_and_an_own_one_does_not():
    for kind in ("own", "shared"):
        # no advantage: what moves the policy is the value loss alone
        a = algorithm(objective=silent, advantages=gae, critic=kind, value_clip=1e9, value_coef=1.0)
        before = start(a)
        after, _ = step_of(a)(before, make_batch())
        moved = any(
            not np.array_equal(x, y)
            for x, y in zip(
                jax.tree.leaves(policy_of(before.params)["embed"]),
                jax.tree.leaves(policy_of(after.params)["embed"]), strict=True,
            )
        )  # fmt: skip
        assert moved == (kind == "shared")


def silent(logp_BT, advantages_BT, mask_BT):
    return 0.0 * logp_BT * advantages_BT * mask_BT.astype(jnp.float32)


def test_a_batch_of_uniform_groups_has_no_gradient():
    a = algorithm()
    batch = replace(make_batch(), rewards_B=np.repeat([0.3, 1.0], R).astype(np.float32))
    before = start(a)
    after, metrics = step_of(a)(before, batch)
    assert float(metrics["grad/norm"]) == 0.0 and float(metrics["loss"]) == 0.0
    for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_mask_without_a_true_token_changes_nothing(plain):
    batch = make_batch()
    after, metrics = plain.run(replace(batch, loss_mask_BT=np.zeros_like(batch.loss_mask_BT)))
    assert all(np.isfinite(float(x)) for x in metrics.values())
    assert float(metrics["grad/norm"]) == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1000.0])
def test_what_stands_at_false_tokens_never_matters(plain, value):
    batch = make_batch()
    dirty = np.where(batch.loss_mask_BT, batch.rollout_logp_BT, value).astype(np.float32)
    plain.same(*plain.run(replace(batch, rollout_logp_BT=dirty)))


def test_an_engine_that_is_worlds_apart_gives_finite_numbers():
    a = algorithm(old_logp="rollout")
    batch = make_batch()
    far = np.where(batch.loss_mask_BT, -200.0, 0.0).astype(np.float32)
    _, metrics = step_of(a)(start(a), replace(batch, rollout_logp_BT=far))
    assert all(np.isfinite(float(x)) for x in metrics.values())
    assert float(metrics["policy/ratio_max"]) > 1e8


def test_a_dropped_token_leaves_the_denominator_only_where_that_is_named():
    drop = (partial(rejection, by="token_k1", low=0.9, high=1.1),)
    stays = algorithm(old_logp="recomputed", correction=drop)
    leaves = algorithm(old_logp="recomputed", correction=drop, mean=kept_token_mean_weights)
    _, half = step_of(stays)(start(stays), make_batch())
    _, full = step_of(leaves)(start(leaves), make_batch())
    kept = 1.0 - float(half["rollout_corr/rollout_rs_masked_fraction"])
    assert 0.05 < kept < 0.95
    assert float(half["loss"]) == pytest.approx(kept * float(full["loss"]), rel=1e-5)


def test_the_kl_term_is_its_weight_times_its_mean():
    bare, with_kl = algorithm(), algorithm(kl_coef=0.5)
    reference = jax.tree.map(lambda x: 1.1 * x, PARAMS)
    _, want = step_of(bare)(start(bare), make_batch())
    _, got = step_of(with_kl)(start(with_kl), make_batch(), None, reference)
    kl = float(got["policy/kl_ref"])
    assert kl > 0
    assert float(got["loss"]) == pytest.approx(float(want["loss"]) + 0.5 * kl, rel=1e-5)


def test_a_reference_that_is_broken_at_false_tokens_never_matters():
    a = algorithm(kl_coef=0.5)
    batch = jax.tree.map(jnp.asarray, make_batch())
    ready = estimated(replace(batch, ref_logp_BT=batch.rollout_logp_BT), a)
    broken = jnp.where(batch.loss_mask_BT, ready.ref_logp_BT, jnp.nan)
    step = partial(
        one_update,
        tx=SGD,
        algorithm=a,
        scorer=Bigram(CFG),
        gate=OPEN,
        seen=UNSEEN,
        microbatches=1,
    )
    want, _ = step(start(a), ready)
    ours, _ = step(start(a), replace(ready, ref_logp_BT=broken))
    for x, y in zip(jax.tree.leaves(ours.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_entropy_bonus_is_its_weight_times_its_mean():
    bare, with_bonus = algorithm(), algorithm(entropy_coef=0.5)
    _, want = step_of(bare)(start(bare), make_batch())
    _, got = step_of(with_bonus)(start(with_bonus), make_batch())
    entropy = float(got["policy/entropy"])
    assert entropy > 1
    assert float(got["loss"]) == pytest.approx(float(want["loss"]) - 0.5 * entropy, rel=1e-5)
