# SPDX-License-Identifier: Apache-2.0
"""Losses as pure functions: arrays in, arrays out; no config, no model, no jit.

Importance weights and rejection are in correction.py, their metrics in mismatch.py; objectives
other than the one `train` uses in objectives.py.
"""

from jaxmoe.losses.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    whiten,
)
from jaxmoe.losses.kl import kl_k1, kl_k2, kl_k3, kl_k3_with_k2_gradient
from jaxmoe.losses.mismatch import mismatch_metrics, weight_metrics
from jaxmoe.losses.objectives import (
    cispo_terms,
    clipped_terms,
    dppo_tv_terms,
    gspo_terms,
    reinforce_terms,
    sapo_terms,
)
from jaxmoe.losses.policy import grpo_loss
from jaxmoe.losses.reduce import (
    fixed_length_weights,
    masked_max,
    masked_mean,
    masked_sum,
    sequence_mean_weights,
    token_mean_weights,
)
from jaxmoe.losses.supervised import cross_entropy

__all__ = [
    "cispo_terms",
    "clipped_terms",
    "cross_entropy",
    "discounted_returns",
    "dppo_tv_terms",
    "fixed_length_weights",
    "gae",
    "group_advantages",
    "grpo_loss",
    "gspo_terms",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_with_k2_gradient",
    "masked_max",
    "masked_mean",
    "masked_sum",
    "mismatch_metrics",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "reinforce_terms",
    "rloo_advantages",
    "sapo_terms",
    "sequence_mean_weights",
    "token_mean_weights",
    "weight_metrics",
    "whiten",
]
