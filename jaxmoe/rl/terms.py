# SPDX-License-Identifier: Apache-2.0
"""Terms of the loss: functions of named arrays that a step evaluates, weights and adds.

    L = Σ_t m_t·w_t·objective_t + Σ_terms weight·f

with m the loss weights and w the importance weights. A term f of shape [B, T] is summed with the
loss weights, as the objective is; a scalar is added as it is. A function takes arrays by the names
of its parameters; `TERM_ARRAYS` lists them. Next: jaxmoe/rl/loss.py evaluates them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import array_parameters, select_arrays
from jaxmoe.losses import clipped_value_loss, kl_k3, masked_mean
from jaxmoe.model.check_ops import function_name

Function = Callable[..., Any]

# Arrays of the routing before the first update of a batch, which the scoring forward returns.
OLD_ROUTING = ("old_router_logits_BTLE", "old_experts_BTLA", "old_switched_BT")
# The arrays that the objective and the terms may take, in addition to recorded ones (`Ops.record`).
# Terms, not the objective, may take those in `Batch.extra` and `Batch.shared`, too.
TERM_ARRAYS = (
    "logp_BT",
    "old_logp_BT",
    "rollout_logp_BT",
    "ref_logp_BT",
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
    "routed_experts_BTLA": "Try --set rollout.compare_experts=True.",
    "load_LE": "Try --set rollout.compare_experts=True.",
    "switched_BT": "Try --set rollout.compare_experts=True.",
    "router_logits_BTLE": "Try --set router.record=record_router_logits.",
    "old_router_logits_BTLE": "Try --set router.record=record_router_logits.",
} | dict.fromkeys(("values_BT", "old_values_BT", "returns_BT"), "Try --set critic.backbone=own.")


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


def entropy_term(coef: float) -> Term:
    """The entropy bonus: −coef·H at every token."""
    return Term(select_entropy, -coef)


def kl_term(coef: float, kl: Function = kl_k3) -> Term:
    """coef·KL(policy, reference) at every token; the metric is policy/kl_ref."""
    return Term(partial(reference_kl, kl=kl), coef, "policy/kl_ref")


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
) -> Float[Array, "B T"]:
    """Return the KL divergence from the reference at every token; 0 at masked tokens."""
    # Select before exp: at a masked token, NaN times a zero cotangent would still be NaN.
    arrays = {"logp_BT": logp_BT, "logq_BT": ref_logp_BT, "old_logp_BT": old_logp_BT}
    arrays = {name: jnp.where(mask_BT, x, 0.0) for name, x in arrays.items()}
    kl_BT = kl(**select_arrays(kl, arrays))
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


def select_term_arrays(function: Function, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that a function of the loss takes.

    Raises ConfigError for one that is None or missing, with what to type.
    """
    for name in array_parameters(function):
        if arrays.get(name) is None:
            raise missing_array(function, name)
    return select_arrays(function, arrays)


def missing_array(function: Function, name: str) -> ConfigError:
    """Return the error for a function of the loss that takes an array which a step lacks."""
    hint = _HINTS.get(
        name,
        "In Python, return it from Ops.record, or give a term its array in Batch(extra={…}) or "
        "Batch(shared={…}).",
    )
    return ConfigError(
        f"loss: {function_name(function)} takes {name}, which this step does not have. {hint}"
    )


def check_token_shape(x: Any, mask_BT: Array, function: Any) -> None:
    """Raise ValueError unless a function returned [B, T]."""
    if getattr(x, "shape", None) != mask_BT.shape:
        raise ValueError(f"{function_name(function)} must return [B, T]")
