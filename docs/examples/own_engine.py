# SPDX-License-Identifier: Apache-2.0
"""An engine in one file: it has no cache, and computes a sequence again for each new token.

COMMAND  PYTHONPATH=docs/examples python -m jaxmoe.train --config tiny.py --workdir runs/own
         --set "rollout.engine=own_engine:describe_own(rows=64)"
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import EngineDescription
from jaxmoe.model import forward
from jaxmoe.model.head import next_token_logits
from jaxmoe.records import Rollout, StopReason


def describe_own(cfg, *, rows=64):
    """Everything that the product asks about this engine; `rows` is an option of its own."""
    return EngineDescription(
        open=lambda cfg, ops, work, mesh: OwnEngine(cfg, ops, rows),
        summary=f"an engine without a cache, {rows} rows at a time",
    )


class OwnEngine:
    incidents = ()  # it never recovers from a fault

    def __init__(self, cfg, ops, rows):
        self.shape = rows, cfg.context

        @jax.jit
        def next_logp(params, tokens_BT, last_B, temperature):
            hidden_BTD = forward(params, tokens_BT, cfg.model, ops)[0]
            hidden_BD = hidden_BTD[jnp.arange(rows), last_B]
            logits_BV = next_token_logits(params, hidden_BD, cfg.model, ops, temperature)
            return jax.nn.log_softmax(logits_BV)

        self.next_logp = next_logp

    def load(self, params, version):
        # The step donates the trainer's arrays, so the engine needs its own.
        self.params, self.version = jax.tree.map(jnp.copy, params), version

    def generate(self, prompts, sampling, *, seed, samples=1, environment=None):
        rng = np.random.default_rng(seed)
        requests = [prompt for prompt in prompts for _ in range(samples)]
        rollouts = []
        for start in range(0, len(requests), self.shape[0]):
            rollouts += self.sample_rows(requests[start : start + self.shape[0]], sampling, rng)
        return rollouts

    def sample_rows(self, prompts, sampling, rng):
        tokens_BT, n_rows = np.zeros(self.shape, np.int32), len(prompts)
        ends_B = np.ones(self.shape[0], np.int32)  # number of tokens of each row
        for b, prompt in enumerate(prompts):
            tokens_BT[b, : len(prompt.tokens)] = prompt.tokens
            ends_B[b] = len(prompt.tokens)
        greedy = sampling.temperature == 0
        temperature = jnp.float32(1.0 if greedy else sampling.temperature)
        logps = np.zeros((self.shape[0], sampling.max_new_tokens), np.float32)
        rows_B, alive_B = np.arange(self.shape[0]), np.arange(self.shape[0]) < n_rows
        first_B = ends_B.copy()
        for step in range(sampling.max_new_tokens):
            logp_BV = np.asarray(self.next_logp(self.params, tokens_BT, ends_B - 1, temperature))
            noise_BV = 0.0 if greedy else rng.gumbel(size=logp_BV.shape)
            token_B = np.argmax(logp_BV + noise_BV, axis=1)
            tokens_BT[alive_B, ends_B[alive_B]] = token_B[alive_B]
            logps[alive_B, step] = logp_BV[rows_B, token_B][alive_B]
            ends_B[alive_B] += 1
            alive_B &= ~np.isin(token_B, sampling.stop_ids)
        rollouts = []
        for b, prompt in enumerate(prompts):
            answer = tokens_BT[b, first_B[b] : ends_B[b]].copy()
            stopped = np.isin(answer[-1], sampling.stop_ids)
            reason = StopReason.STOP_TOKEN if stopped else StopReason.MAX_TOKENS
            versions = np.full(len(answer), self.version, np.int32)
            rollouts.append(Rollout(prompt, answer, logps[b, : len(answer)], reason, versions))
        return rollouts

    def close(self):
        """Nothing to stop."""
