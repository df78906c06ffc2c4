# SPDX-License-Identifier: Apache-2.0
"""Random episodes, with garbage where an engine reports what has no meaning."""

from dataclasses import dataclass, replace

import numpy as np

from jaxmoe.records import UNKNOWN_EXPERT, Prompt, Rollout, StopReason

VOCAB = 29
LAYERS, EXPERTS, ACTIVE = 2, 5, 2
STOPS = tuple(StopReason)
GARBAGE_LOGP = (np.nan, 7.0, -1e30, np.inf)


@dataclass(frozen=True)
class Heard:
    """What an engine saw of an episode: the ids of the prompt, and of each turn and reply."""

    prompt: list[int]
    parts: list[tuple[bool, list[int]]]  # (True for the policy's, ids)

    @property
    def ids(self):
        return self.prompt + [t for _, ids in self.parts for t in ids]

    @property
    def sampled(self):
        """(position, id) of each sampled token."""
        position, out = len(self.prompt), []
        for is_policy, ids in self.parts:
            out += [(position + i, t) for i, t in enumerate(ids) if is_policy]
            position += len(ids)
        return out


def draw_episode(rng, number=0, *, prompt=None, max_turns=3, max_turn=3, max_reply=4):
    """Return what the engine saw, and the rollout that it returns."""
    if prompt is None:
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 4)).tolist())
    parts, turns = [], int(rng.integers(1, max_turns + 1))
    for turn in range(turns):
        parts.append((True, rng.integers(0, VOCAB, rng.integers(1, max_turn + 1)).tolist()))
        if turn < turns - 1:
            parts.append((False, rng.integers(0, VOCAB, rng.integers(1, max_reply + 1)).tolist()))
    tokens = np.array([t for _, ids in parts for t in ids], np.int32)
    mask = np.array([is_policy for is_policy, ids in parts for _ in ids])
    logp = np.where(mask, -rng.uniform(2.5, 4.0, len(tokens)), 0.0).astype(np.float32)
    read = len(prompt) + len(tokens) - 1
    ranks = rng.random((read, LAYERS, EXPERTS)).argsort(-1)[..., :ACTIVE]
    rollout = Rollout(
        Prompt(number, "", prompt, None),
        tokens,
        logp,
        STOPS[int(rng.integers(len(STOPS)))],
        np.full(len(tokens), 3, np.int32),
        routed_experts=ranks.astype(np.int8),
        policy_mask=mask,
    )
    return Heard(list(prompt), parts), rollout


def draw_groups(rng, prompts, samples, **limits):
    """Return the rollouts of several prompts, the samples of each as neighbours."""
    out = []
    for number in range(prompts):
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 4)).tolist())
        out += [draw_episode(rng, number, prompt=prompt, **limits)[1] for _ in range(samples)]
    return out


def put_garbage(rollout, rng, *, experts=False):
    """Replace what an engine reports for the environment's tokens; experts become unknown."""
    env = ~rollout.sampled_mask
    logp, versions = rollout.rollout_logp.copy(), rollout.weight_versions.copy()
    logp[env], versions[env] = rng.choice(GARBAGE_LOGP, env.sum()), -5
    log_kept = np.where(env, rng.choice(GARBAGE_LOGP, len(env)), 0.0).astype(np.float32)
    changed = replace(rollout, rollout_logp=logp, weight_versions=versions, log_kept=log_kept)
    if not experts:
        return changed
    unknown = rollout.routed_experts.copy()
    is_env = np.concatenate([np.zeros(len(rollout.prompt.tokens), bool), env])[: len(unknown)]
    unknown[is_env] = UNKNOWN_EXPERT
    return replace(changed, routed_experts=unknown)
