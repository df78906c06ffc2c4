# SPDX-License-Identifier: Apache-2.0
"""Losses as pure functions: arrays in, arrays out; no config, no model, no jit."""

from jaxmoe.losses.advantages import group_advantages
from jaxmoe.losses.kl import kl_k1, kl_k3
from jaxmoe.losses.policy import grpo_loss
from jaxmoe.losses.reduce import masked_max, masked_mean, masked_sum
from jaxmoe.losses.supervised import cross_entropy

__all__ = [
    "cross_entropy",
    "group_advantages",
    "grpo_loss",
    "kl_k1",
    "kl_k3",
    "masked_max",
    "masked_mean",
    "masked_sum",
]
