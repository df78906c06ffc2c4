# SPDX-License-Identifier: Apache-2.0
"""Bytes of what a step keeps of the router for all tokens of a batch.

Next: jaxmoe/run/memory.py adds them to those of the run.
"""

import math

from jaxmoe.config import Config
from jaxmoe.records import expert_dtype
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.metrics.router_metrics import STATISTICS


def routing_bytes(cfg: Config) -> int:
    """Return the bytes on one device of old router logits, and of the rows of router.instruments.

    They are 0 without instruments and without a function of the loss that takes old logits.
    """
    m, mesh, r = cfg.model, cfg.mesh, cfg.router
    rows = math.ceil(cfg.rollout.sequences_per_step / mesh.row_shards)
    tokens = rows * cfg.context // mesh.sequence
    experts = m.experts_per_token * expert_dtype(m.n_experts).itemsize
    per_token = 0
    if r.instruments:
        # Of each update's forward, and the experts of the one before the first update.
        statistics = 4 * len(STATISTICS) + experts
        per_token += m.n_layers * (cfg.loss.epochs * statistics + experts)
    # Only with recorded logits can a function take old ones.
    if "router_kl" in r.term_weights or (
        r.record.strip() and algorithm_from_config(cfg).takes_array("old_router_logits_BTLE")
    ):
        per_token += m.n_layers * 4 * m.n_experts
    return tokens * per_token
