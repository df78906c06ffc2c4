# SPDX-License-Identifier: Apache-2.0
"""Terms of the loss: functions of named arrays that a step evaluates, weights and adds.

    L = Σ_t m_t·w_t·objective_t + Σ_terms weight·f

with m the loss weights and w the importance weights. A term f of shape [B, T] is summed with the
loss weights, as the objective is; a scalar is added as it is. A function takes arrays by the names
of its parameters; `TERM_ARRAYS` lists those of every step. Next: jaxmoe/rl/loss.py adds them.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.batches.microbatches import LossAux
from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import array_parameters
from jaxmoe.losses import clipped_value_loss, kl_k3, masked_mean, masked_sum
from jaxmoe.model.check_ops import function_name

Function = Callable[..., Any]

# Arrays of the routing before the first update of a batch, which the scoring forward returns.
OLD_ROUTING = ("old_router_logits_BTLE", "old_experts_BTLA", "old_switched_BT")
# The arrays that the objective and the terms may take, in addition to recorded ones (`Ops.record`)
# and those in `Batch.extra` and `Batch.shared`.
TERM_ARRAYS = (
    "logp_BT",
    "old_logp_BT",
    "rollout_logp_BT",
    "ref_logp_BT",
    "teacher_logp_BT",
    "teacher_reverse_kl_BT",
    "teacher_forward_kl_BT",
    "entropy_BT",
    "advantages_BT",
    "mask_BT",
    "token_mask_BT",
    "values_BT",
    "old_values_BT",
    "returns_BT",
    "routed_experts_BTLA",
    "total",
    "n_tokens",
    "step",
    "load_LE",
    "experts_E",
    "experts_BTLA",
    "router_logits_BTLE",
    "switched_BT",
    *OLD_ROUTING,
)

_HINTS = {
    "ref_logp_BT": "Try --set loss.kl_coef=0.001, which keeps a reference and adds 0.001·KL.",
    "teacher_logp_BT": "Try --set distill.teacher=base --set distill.advantage_coef=1.0.",
    "routed_experts_BTLA": "Try --set rollout.compare_experts=True.",
    "load_LE": "Try --set rollout.compare_experts=True.",
    "switched_BT": "Try --set rollout.compare_experts=True.",
    "router_logits_BTLE": "Try --set router.record=record_router_logits.",
    "old_router_logits_BTLE": "Try --set router.record=record_router_logits.",
    "turn_ends_BJ": "Turns need an environment or tools, and rollout.max_turns above 1. Try --set "
    "loss.advantages=group_advantages.",
    "state_ids_BJ": 'An environment names states by info["state_key"]. Try --set '
    "loss.advantages=turn_return_advantages, or --set data.environment=module:name.",
} | dict.fromkeys(("values_BT", "old_values_BT", "returns_BT"), "Try --set critic.backbone=own.")
_HINTS |= dict.fromkeys(
    ("teacher_reverse_kl_BT", "teacher_forward_kl_BT"),
    "Try --set distill.teacher=base --set distill.reverse_kl_coef=0.1, or a folder of weights.",
)


@dataclass(frozen=True)
class Term:
    """One summand of the loss, in addition to the objective.

    `fn(arrays)` returns [B, T], or a scalar that is a sum over the rows of its microbatch: divide
    by `total`, the trained tokens of the update, or `n_tokens`, all tokens that the model reads,
    and microbatches add up to the batch. It may return (value, metrics), with metrics of shape
    [B, T] or scalars by name; a scalar metric is added over microbatches, as the value is.
    """

    fn: Function
    weight: float = 1.0  # 0: the term is a metric only
    name: str = ""  # metric of the term's mean over trained tokens, or of the scalar; "": none
    array_names: tuple[str, ...] = field(init=False, compare=False)  # names of the arrays of `fn`

    def __post_init__(self) -> None:
        object.__setattr__(self, "array_names", array_parameters(self.fn))


def entropy_term(coef: float) -> Term:
    """The entropy bonus: −coef·H at every token."""
    return Term(select_entropy, -coef)


def kl_term(coef: float, kl: Function = kl_k3) -> Term:
    """coef·KL(policy, reference) at every token; the metric is policy/kl_ref."""
    fn = partial(reference_kl, kl=kl, kl_arrays=array_parameters(kl))
    return Term(fn, coef, "policy/kl_ref")


def value_term(coef: float = 0.5, clip: float = 0.5) -> Term:
    """coef·the critic's loss, a mean over tokens; the metric is critic/loss."""
    return Term(partial(value_loss, clip=clip), coef, "critic/loss")


def select_entropy(entropy_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the entropy of the policy at every token, in nats."""
    return entropy_BT


def reference_kl(
    logp_BT: Float[Array, "B T"],
    ref_logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    kl: Function = kl_k3,
    kl_arrays: tuple[str, ...] = ("logp_BT", "logq_BT"),
) -> Float[Array, "B T"]:
    """Return the KL divergence from the reference at every token; 0 at masked tokens.

    `kl_arrays` are the names of the arrays of `kl`.
    """
    # Select before exp: at a masked token, NaN times a zero cotangent would still be NaN.
    arrays = {"logp_BT": logp_BT, "logq_BT": ref_logp_BT, "old_logp_BT": old_logp_BT}
    arrays = {name: jnp.where(mask_BT, x, 0.0) for name, x in arrays.items()}
    kl_BT = kl(**{name: arrays[name] for name in kl_arrays})
    check_token_shape(kl_BT, mask_BT, kl)
    return kl_BT


def value_loss(
    values_BT: Float[Array, "B T"],
    old_values_BT: Float[Array, "B T"],
    returns_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    total: Float[Array, ""],
    *,
    clip: float = 0.5,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean of `clipped_value_loss` over the tokens of the update, and the metric of
    clipped values."""
    loss_BT = clipped_value_loss(values_BT, old_values_BT, returns_BT, mask_BT, clip=clip)
    is_clipped_BT = jnp.abs(values_BT - old_values_BT) > clip
    return masked_mean(loss_BT, mask_BT, total), {"critic/clip_frac": is_clipped_BT}


def add_terms(
    terms: Iterable[Term],
    arrays: Mapping[str, Any],
    loss_weights_BT: Float[Array, "B T"],
    loss: Array,
    aux: LossAux,
    *,
    rescales: bool,
) -> tuple[Array, LossAux]:
    """Return the loss with its terms added, and their metrics added to `aux`.

    `rescales` is True if the complete loss is rescaled after the gradient.
    """
    for term in terms:
        summand, term_aux, is_scalar = evaluate_term(term, arrays, loss_weights_BT)
        if is_scalar and term.weight and rescales:
            raise ConfigError(
                f"loss.terms: {function_name(term.fn)} returns a scalar, and loss.aggregation "
                "rescales the complete loss when it knows which tokens are dropped. Return [B, T], "
                "or try --set loss.old_logp=recomputed."
            )
        repeated = {*aux.sums, *aux.totals} & {*term_aux.sums, *term_aux.totals}
        check_new_names(repeated, "the metrics of two terms")
        aux = replace(aux, sums=aux.sums | term_aux.sums, totals=aux.totals | term_aux.totals)
        # A term of weight 0 is only a metric. Adding 0·f would make the loss NaN where f is not
        # finite.
        if term.weight != 0.0:
            loss = loss + term.weight * summand
    return loss, aux


def check_new_names(repeated: Set[str], subject: str) -> None:
    """Raise ConfigError for names that are repeated."""
    if repeated:
        raise ConfigError(
            f"loss: {subject} must have different names, got {sorted(repeated)} twice."
        )


def evaluate_term(
    term: Term, arrays: Mapping[str, Any], loss_weights_BT: Float[Array, "B T"]
) -> tuple[Float[Array, ""], LossAux, bool]:
    """Return the value of a term that the loss adds, before its weight, its metrics, and True if
    the term's function returned a scalar.

    Raises ConfigError for a value that is neither [B, T] nor a scalar.
    """
    mask_BT, total = arrays["mask_BT"], arrays["total"]
    value = term.fn(**{name: arrays[name] for name in term.array_names})
    value, metrics = value if isinstance(value, tuple) else (value, {})
    name = f"loss.terms: {function_name(term.fn)}"
    is_scalar = jnp.shape(value) == ()
    if is_scalar:
        summand = mean = jnp.asarray(value)
    elif jnp.shape(value) == mask_BT.shape:
        summand = masked_sum(value * loss_weights_BT, mask_BT)
        mean = masked_mean(value, mask_BT, total)
    else:
        raise ConfigError(
            f"{name} must return [B, T] = {mask_BT.shape} or a scalar, got {jnp.shape(value)}."
        )
    totals = {}
    for key, x in metrics.items():
        if jnp.shape(x) not in ((), mask_BT.shape):
            raise ConfigError(
                f"{name} must return metrics of shape [B, T] or scalars; {key} has "
                f"shape {jnp.shape(x)}."
            )
        x = jnp.asarray(x, jnp.float32)
        # `mean_metrics` divides every total by the number of tokens. A scalar is meant to be added
        # as it is, so the division is undone in advance.
        totals[key] = masked_sum(x, mask_BT) if x.ndim else x * total
    sums = {term.name: mean} if term.name else {}
    return summand, LossAux(sums=sums, totals=totals), is_scalar


def missing_array(key: str, function: Function, name: str, existing: Iterable[str]) -> ConfigError:
    """Return the error for a function that takes an array which a step lacks."""
    hint = _HINTS.get(
        name,
        f"In Python, add it to the batch as Batch(extra={{{name!r}: …}}), rows [B, …], or as "
        f"Batch(shared={{{name!r}: …}}); a config records one by router.record=module:function.",
    )
    return ConfigError(
        f"{key}: {function_name(function)} takes {name}, which this step does not have. It may "
        f"take {', '.join(sorted(existing))}. {hint}"
    )


def check_token_shape(x: Any, mask_BT: Array, function: Any) -> None:
    """Raise ValueError unless a function returned [B, T]."""
    if getattr(x, "shape", None) != mask_BT.shape:
        raise ValueError(f"{function_name(function)} must return [B, T]")
