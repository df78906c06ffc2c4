# SPDX-License-Identifier: Apache-2.0
"""A run whose loss reads an array of your own: one bias for each layer and expert.

`train_with_bias(term, bias_LE)` trains tiny.py with a term (router_logits_BTLE, bias_LE, …).
"""

from dataclasses import replace

from jaxmoe.config_file import load_config, override
from jaxmoe.rl.terms import Term
from jaxmoe.run.parts import make_parts
from jaxmoe.train import train


def train_with_bias(term, bias_LE, *settings):
    cfg = override(load_config("tiny.py"), "router.record=record_router_logits", *settings)
    parts = make_parts(cfg)

    def make_batch(*arguments):
        batch = parts.make_batch(*arguments)
        return replace(batch, shared=batch.shared | {"bias_LE": bias_LE})

    # the third argument of Term names the metric; without it there is none
    terms = (*parts.algorithm.terms, Term(term, 0.01, "loss/bias"))
    algorithm = replace(parts.algorithm, terms=terms)
    train(cfg, replace(parts, algorithm=algorithm, make_batch=make_batch))
