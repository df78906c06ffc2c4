# SPDX-License-Identifier: Apache-2.0
"""Checks of algorithms: their functions fit together, and take arrays that a step has.

jaxmoe/rl/check_rl_step.py checks the arrays of a batch. Next: jaxmoe/rl/algorithm.py.
"""

import traceback
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.microbatches import share_scalars
from jaxmoe.config import ConfigError, require
from jaxmoe.losses import kl_k1
from jaxmoe.model.check_ops import function_name
from jaxmoe.rl.algorithm import ARRAYS, Algorithm, list_functions
from jaxmoe.rl.loss import (
    collect_arrays,
    collect_known_arrays,
    compute_loss_weights,
    estimate_advantages,
    sum_terms,
)
from jaxmoe.rl.terms import OLD_ROUTING, Term, missing_array, reference_kl

# Trailing sizes of arrays that have more axes than [B, T]; all differ, so that a swap is found.
_LAYERS, _EXPERTS, _ACTIVE, _TURNS = 11, 7, 5, 13


def check_algorithm(
    a: Algorithm,
    samples: int,
    recorded: Mapping[str, tuple[int, ...]] | None = None,
    routing: tuple[int, int, int] = (_LAYERS, _EXPERTS, _ACTIVE),
    batch: Batch | None = None,
) -> None:
    """Check an algorithm by tracing the step's arithmetic on abstract arrays.

    Args:
        samples: rows per prompt.
        recorded: arrays that `Ops.record` returns, [B, T, …], by name: the sizes after B and T.
            By default the router's are assumed.
        routing: number of layers, experts, and active experts.
        batch: one with the arrays in `extra` and `shared` that the step will have; None: it has
            none, and the engine's experts.
    Raises ConfigError with the message of a function that fails, for a function that takes an array
    which does not exist, or if functions do not fit together.
    """
    r = samples
    needs_values = "values_BT" in a.array_names.advantages
    require(
        not needs_values or a.critic != "none",
        f"loss.advantages: {function_name(a.advantages)} takes values_BT, and there is no critic. "
        "Try --set critic.backbone=own.",
    )
    require(
        needs_values or a.critic == "none",
        f"critic.backbone={a.critic} needs advantages that take values_BT; "
        f"{function_name(a.advantages)} does not. Try --set loss.advantages=gae, or --set "
        "critic.backbone=none.",
    )
    require(
        a.critic == "none" or any("values_BT" in term.array_names for term in a.terms),
        f"critic={a.critic} needs a term that trains it. Try terms=(value_term(),).",
    )
    require(
        a.updates == 1 or a.old_logp != "detached" or "old_logp_BT" not in a.array_names.objective,
        f"loss.old_logp=detached needs one update per batch, got {a.epochs} epochs of "
        f"{a.minibatches} minibatches: after the first update the batch is off-policy and its "
        "ratio is not 1. Try --set loss.old_logp=recomputed.",
    )
    # With several updates, something must compare the current policy with the one that sampled.
    ratio_arrays = {"old_logp_BT", "rollout_logp_BT"} & set(a.array_names.objective)
    corrects_each_update = a.rollout_correction and a.old_logp != "recomputed"
    require(
        a.updates == 1 or bool(ratio_arrays) or bool(corrects_each_update),
        f"loss.objective: {function_name(a.objective)} has no ratio, and there are {a.epochs} "
        f"epochs of {a.minibatches} minibatches: after the first update nothing corrects for "
        "tokens of an older policy. Try --set loss.objective=ppo_clip, or --set loss.epochs=1 "
        "--set loss.minibatches=1.",
    )
    require(
        not any(_is_kl_k1(term) for term in a.terms),
        "loss.kl=kl_k1 has an expected gradient of 0, so it does not act in the loss. Try "
        "--set loss.kl=kl_k3_with_k2_gradient, or --set loss.kl_in=reward.",
    )
    require(
        r > 1 or "rewards_PR" not in a.array_names.advantages,
        f"loss.advantages: {function_name(a.advantages)} compares the samples of a prompt, and "
        f"rollout.samples_per_prompt is {r}. Try --set rollout.samples_per_prompt=8. In Python it "
        "is Batch(samples_per_prompt=8).",
    )

    for function, names in zip(a.rollout_correction, a.array_names.rollout_correction, strict=True):
        require(
            a.corrects_before_updates or "batch_mask_BT" not in names,
            f"loss.rollout_correction: {function_name(function)} takes batch_mask_BT, which is "
            "known before the gradient only if the batch is scored first. Try --set "
            "loss.old_logp=recomputed.",
        )

    def trace_step() -> bool:
        """Return True if the correction weights tokens."""
        abstract, out = _abstract_batch(a, r, recorded, routing, batch)
        _check_arrays_exist(a, abstract, out)
        abstract = compute_loss_weights(estimate_advantages(abstract, a), a)
        abstract = share_scalars(abstract, jnp.int32(0))
        _, aux = sum_terms(a, abstract, out)
        return aux.rows["correction"].weights_BT is not None

    # eval_shape returns only shapes, so the result, a Python bool, leaves the trace in a list.
    weights: list[bool] = []
    try:
        jax.eval_shape(lambda: weights.append(trace_step()))
    except ConfigError:
        raise  # it says what to type
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"loss: {' '.join(str(error).split())}") from error  # one line
    # Any other error is of a function itself, such as a KeyError of a dict of its own.
    except Exception as error:
        raise ConfigError(
            f"loss: each function must run on the arrays of a step; {_describe_error(error)}. "
            "Correct the function."
        ) from error
    require(
        not (a.old_logp == "rollout" and weights[0]),
        "loss.old_logp=rollout and importance weights in loss.rollout_correction correct the same "
        "mismatch twice. Try --set loss.old_logp=recomputed, or a rejection alone.",
    )


def _describe_error(error: Exception) -> str:
    """Type, text and line of an error; the line is the last one outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    written = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text:.300} ({written[-1].filename}:{written[-1].lineno}, in {written[-1].name})"


def _is_kl_k1(term: Term) -> bool:
    kl = getattr(term.fn, "keywords", {}).get("kl")
    is_kl = getattr(term.fn, "func", None) is reference_kl
    return is_kl and term.weight != 0.0 and getattr(kl, "func", kl) is kl_k1


def _check_arrays_exist(a: Algorithm, batch: Batch, out: Mapping[str, jax.Array]) -> None:
    """Raise ConfigError for a function that takes an array which a step does not have."""
    shared = {n for n, x in {**batch.extra, **batch.shared}.items() if x is not None}
    early = {n for n, x in collect_known_arrays(batch).items() if x is not None} | {*out}
    of_update = share_scalars(batch, jnp.int32(0))
    forward = {n for n, x in collect_arrays(a, of_update, out).items() if x is not None}
    has_experts = batch.routed_experts_BTLA is not None and "experts_BTLA" in out
    corrected = {"log_ratio_BT", "advantages_BT", "weights_BT", "ratio_BT", "batch_mask_BT"}
    corrected |= {"switched_BT"} if has_experts else set()
    existing = {
        "loss.advantages": early | {"rewards_PR", "rewards_BT"},
        "loss.aggregation": shared | {*ARRAYS["aggregation"]},
        "loss.rollout_correction": (early if a.corrects_before_updates else forward) | corrected,
        "loss.objective": forward | {"advantages_BT"},
        "loss.terms": forward
        | {"advantages_BT"}
        | ({"returns_BT"} if a.critic != "none" else set()),
    }
    for key, fn, names in list_functions(a):
        for name in names:
            if name not in existing[key]:
                raise missing_array(key, fn, name, existing[key])


def _abstract_batch(
    a: Algorithm,
    r: int,
    recorded: Mapping[str, tuple[int, ...]] | None,
    routing: tuple[int, int, int],
    example: Batch | None,
) -> tuple[Batch, dict[str, jax.Array]]:
    """Return a scored batch and the results of a forward, with sizes that all differ."""
    # p, r and t differ, and t is larger than p·r, so that a function which transposes its result or
    # mixes up two axes returns another shape and is refused.
    (layers, experts, active), p = routing, 3 if r == 2 else 2
    t = p * r + 1
    x_BT, mask_BT = jnp.zeros((p * r, t)), jnp.ones((p * r, t), bool)
    ends_BJ = jnp.zeros((p * r, _TURNS), jnp.int32)
    has_critic = a.critic != "none"
    has_experts = example is None or example.routed_experts_BTLA is not None
    if recorded is None:
        recorded = {"router_logits_BTLE": (layers, experts), "experts_BTLA": (layers, active)}
    out = {
        name: jnp.zeros((p * r, t, *sizes), jnp.int32 if name == "experts_BTLA" else None)
        for name, sizes in recorded.items()
    }
    shared = {"step": jnp.int32(0), "experts_E": jnp.zeros(experts, jnp.int32)}
    if has_experts:
        shared["load_LE"] = jnp.zeros((layers, experts), jnp.int32)
    batch = Batch(
        tokens_BT=x_BT,
        positions_BT=x_BT,
        segment_ids_BT=x_BT,
        loss_mask_BT=mask_BT,
        rollout_logp_BT=x_BT,
        rewards_B=x_BT[:, 0],
        samples_per_prompt=r,
        routed_experts_BTLA=jnp.zeros((p * r, t, layers, active), jnp.int32)
        if has_experts
        else None,
        shared=shared,
        turn_ends_BJ=None if example is not None and example.turn_ends_BJ is None else ends_BJ,
        state_ids_BJ=None if example is not None and example.state_ids_BJ is None else ends_BJ,
        old_experts_BTLA=out.get("experts_BTLA"),
        old_router_logits_BTLE=out.get("router_logits_BTLE"),
        old_logp_BT=x_BT if a.needs_scoring else None,
        ref_logp_BT=x_BT if a.needs_reference else None,
        teacher_logp_BT=x_BT if a.needs_teacher_logp else None,
        old_values_BT=x_BT if has_critic else None,
        bootstrap_B=x_BT[:, 0] if has_critic else None,
    )
    if a.needs_divergences:
        out |= {"teacher_reverse_kl_BT": x_BT, "teacher_forward_kl_BT": x_BT}
    out |= {"logp_BT": x_BT, "entropy_BT": x_BT} | ({"values_BT": x_BT} if has_critic else {})
    if example is not None:
        rows, length = p * r, np.shape(example.tokens_BT)[1]
        extra = {
            name: jnp.zeros(
                (rows, *(t if n == length else n for n in np.shape(x)[1:])),
                jax.dtypes.canonicalize_dtype(x.dtype),
            )
            for name, x in example.extra.items()
        }
        own_shared = {
            n: jnp.zeros(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))
            for n, x in example.shared.items()
        }
        batch = replace(batch, extra=extra, shared=batch.shared | own_shared)
    early = a.recorded_before_updates(batch) & {*out}
    return replace(batch, recorded={name: out[name] for name in early}), out


def check_old_arrays(a: Algorithm) -> None:
    """Raise ConfigError if a function takes the routing before the first update, and there is one
    update: both would be the same."""
    for _, fn, array_names in list_functions(a):
        names = [name for name in array_names if name in OLD_ROUTING]
        require(
            a.updates > 1 or not names,
            f"loss: {function_name(fn)} takes {', '.join(names)}, from before the first update of "
            "a batch, and needs several updates, got loss.epochs=1 and loss.minibatches=1. Try "
            "--set loss.minibatches=2 --set loss.old_logp=recomputed.",
        )


def check_staleness(a: Algorithm, max_staleness: int) -> None:
    """Raise ConfigError if tokens may be `max_staleness` versions old and nothing corrects for it.

    A token is sampled by μ, and rollout_logp is its log μ, also if several versions sampled one
    rollout. π is the policy, π_old the trainer before the updates of the step. Correct for
    μ ≠ π_old are:

    - old_logp="detached" with weights: ρ = π/μ, so E_μ[min(ρ, high)·A·∇log π], the policy gradient
      where ρ < high. There is no clip: only `high` limits how far π moves from μ.
    - old_logp="recomputed" with weights: ρ = π_old/μ corrects for the age, the clipped ratio
      π/π_old for the updates. Source: decoupled PPO, arXiv:2110.00641; AReaL, arXiv:2505.24298.
    - old_logp="rollout": the ratio is π/μ, and its clip limits age and updates together.

    A rejection keeps tokens with μ near π; the bias remains, but is bounded. Without any of these
    the gradient is E_μ[A·∇log π], as if π had sampled the tokens: the ratio is 1 and hides the age.
    """
    names = a.array_names.objective
    uses_rollout_logp = "rollout_logp_BT" in names or (
        a.old_logp == "rollout" and "old_logp_BT" in names
    )
    require(
        max_staleness == 0 or uses_rollout_logp or bool(a.rollout_correction),
        f"rollout.max_staleness={max_staleness} trains on tokens of older weights, and nothing in "
        f"the loss corrects for it: {function_name(a.objective)}, loss.old_logp={a.old_logp}, no "
        'loss.rollout_correction. Try --set "loss.rollout_correction=token_is(high=2.0)".',
    )
