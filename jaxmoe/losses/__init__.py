# SPDX-License-Identifier: Apache-2.0
"""Losses as pure functions: arrays in, arrays out; no config, no model, no jit.

A config names functions of objectives.py (the loss at every token), advantages.py, aggregation.py
(from tokens to one loss), rollout_correction.py (for an engine whose log-probs differ from the
trainer's; built from ratios.py) and kl.py. value.py has the critic's loss, router_terms.py
terms about the router, and routed_ratios.py objectives that use each token's experts.
"""

from jaxmoe.losses.advantages import (
    bootstrapped_gae,
    discounted_returns,
    gae,
    group_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    whiten,
    whitened_bootstrapped_gae,
    whitened_gae,
)
from jaxmoe.losses.aggregation import (
    kept_token_mean,
    masked_max,
    masked_mean,
    masked_sum,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean,
)
from jaxmoe.losses.kl import kl_k1, kl_k2, kl_k3, kl_k3_importance, kl_k3_with_k2_gradient
from jaxmoe.losses.mismatch import mismatch_metrics
from jaxmoe.losses.objectives import (
    cispo,
    dppo_tv,
    grpo_loss,
    gspo,
    ppo_clip,
    reinforce,
    sapo,
)
from jaxmoe.losses.rewards import overlong_penalty, token_rewards
from jaxmoe.losses.rollout_correction import (
    drift_mask,
    geometric_is,
    normalize,
    rejection,
    sequence_icepop,
    sequence_is,
    token_icepop,
    token_is,
    veto,
)
from jaxmoe.losses.routed_ratios import (
    erpo,
    length_scaled_clip,
    mask_switched,
    rspo,
    switch_aware_clip,
)
from jaxmoe.losses.router_terms import load_balance, router_entropy, router_kl, z_loss
from jaxmoe.losses.supervised import cross_entropy
from jaxmoe.losses.turns import (
    gigpo,
    gigpo_rloo,
    turn_gae,
    turn_group_advantages,
    turn_return_advantages,
    turn_rloo_advantages,
    whitened_turn_gae,
)
from jaxmoe.losses.value import clipped_value_loss, explained_variance

__all__ = [
    "bootstrapped_gae",
    "cispo",
    "clipped_value_loss",
    "cross_entropy",
    "discounted_returns",
    "dppo_tv",
    "drift_mask",
    "erpo",
    "explained_variance",
    "gae",
    "geometric_is",
    "gigpo",
    "gigpo_rloo",
    "group_advantages",
    "grpo_loss",
    "gspo",
    "kept_token_mean",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_importance",
    "kl_k3_with_k2_gradient",
    "length_scaled_clip",
    "load_balance",
    "mask_switched",
    "masked_max",
    "masked_mean",
    "masked_sum",
    "mismatch_metrics",
    "normalize",
    "overlong_penalty",
    "ppo_clip",
    "reinforce",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "rejection",
    "rloo_advantages",
    "router_entropy",
    "router_kl",
    "rspo",
    "sapo",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
    "sequence_icepop",
    "sequence_is",
    "switch_aware_clip",
    "token_icepop",
    "token_is",
    "token_mean",
    "token_rewards",
    "turn_gae",
    "turn_group_advantages",
    "turn_return_advantages",
    "turn_rloo_advantages",
    "veto",
    "whiten",
    "whitened_bootstrapped_gae",
    "whitened_gae",
    "whitened_turn_gae",
    "z_loss",
]
