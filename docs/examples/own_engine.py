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
from jaxmoe.records import StopReason
from jaxmoe.rollout.replies import PendingReplies
from jaxmoe.rollout.turns import Episode


def describe_own(cfg, *, rows=64):
    """Everything that the product asks about this engine; `rows` is an option of its own."""
    return EngineDescription(
        open=lambda cfg, ops, work, mesh: OwnEngine(cfg, ops, rows),
        summary=f"an engine without a cache, {rows} rows at a time",
        runs_episodes=True,
        changeable_options=frozenset(("rows",)),  # a resumed run may have another
    )


class OwnEngine:
    incidents = ()  # it never recovers from a fault

    def __init__(self, cfg, ops, rows):
        self.shape = rows, cfg.read_context

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
        rng, rows = np.random.default_rng(seed), self.shape[0]
        limit = sampling.max_context or self.shape[1]
        # An answer without an environment is an episode of one turn.
        episodes = [Episode(prompt, sampling, limit) for prompt in prompts for _ in range(samples)]
        active = range(len(episodes))
        while active:
            for start in range(0, len(active), rows):
                batch = active[start : start + rows]
                self.sample_turn([episodes[i] for i in batch], sampling, rng)
            active = continue_episodes(episodes, active, environment)
        return [episode.make_rollout() for episode in episodes]

    def sample_turn(self, episodes, sampling, rng):
        """Add a turn of the policy to each episode."""
        rows = self.shape[0]
        tokens_BT = np.zeros(self.shape, np.int32)
        ends_B = np.ones(rows, np.int32)  # number of tokens of each row
        limits_B = np.zeros(rows, np.int32)  # tokens of the turn
        for b, episode in enumerate(episodes):
            context = episode.context
            tokens_BT[b, : len(context)] = context
            ends_B[b], limits_B[b] = len(context), episode.turn_limit
        greedy = sampling.temperature == 0
        temperature = jnp.float32(1.0 if greedy else sampling.temperature)
        logp_BT = np.zeros((rows, limits_B.max()), np.float32)
        first_B, alive_B = ends_B.copy(), limits_B > 0
        for step in range(limits_B.max()):
            logp_BV = np.asarray(self.next_logp(self.params, tokens_BT, ends_B - 1, temperature))
            noise_BV = 0.0 if greedy else rng.gumbel(size=logp_BV.shape)
            token_B = np.argmax(logp_BV + noise_BV, axis=1)
            tokens_BT[alive_B, ends_B[alive_B]] = token_B[alive_B]
            logp_BT[alive_B, step] = logp_BV[np.arange(rows), token_B][alive_B]
            ends_B[alive_B] += 1
            alive_B &= ~np.isin(token_B, sampling.stop_ids) & (step + 1 < limits_B)
        for b, episode in enumerate(episodes):
            turn = tokens_BT[b, first_B[b] : ends_B[b]].copy()
            versions = np.full(len(turn), self.version, np.int32)
            episode.add_turn(turn, logp_BT[b, : len(turn)], versions)

    def close(self):
        """Nothing to stop."""


def continue_episodes(episodes, active, environment):
    """Have the environment reply to the last turns; return the episodes that go on."""
    # A turn that reached a limit has ended its episode already.
    waiting = [i for i in active if episodes[i].stop is None]
    if environment is None:
        for i in waiting:
            episodes[i].stop = StopReason.STOP_TOKEN
        return []
    replies = PendingReplies(environment)
    for i in waiting:
        replies.submit(i, episodes[i].last_turn.tolist())
    return sorted(i for i, reply in replies.wait(0.0).items() if episodes[i].add_reply(reply))
