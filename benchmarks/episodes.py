# SPDX-License-Identifier: Apache-2.0
"""Cost of episodes on a kept cache, against prefilling each turn anew.

COMMAND  python -m benchmarks.episodes

Both sample the same number of turns of 64 rows with the native engine and the same environment. The
baseline sends each turn as a new prompt, with all that was said before, to an engine of single
answers, which shrinks its batch when rows end. CPU seconds of the process, alternated, after a
round that compiles.
"""

import sys
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxmoe.config_file import load_config, override
from jaxmoe.model import init_params, make_ops
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.rollout.turns import Episode
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment

ROWS, TURNS, ROUNDS = 64, 6, 3
PROMPT, TURN, CONTEXT = 128, 64, 1152
STOPS = tuple(range(32, 41))  # a random policy stops after about 28 tokens


def main() -> None:
    config = override(load_config("tiny.py"), f"model.max_context={CONTEXT}")
    cfg, ops = config.model, make_ops(config)
    params = init_params(jax.random.key(0), cfg)
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(
            i, "", tuple(rng.integers(50, 250, int(rng.integers(64, PROMPT + 1))).tolist()), None
        )
        for i in range(ROWS)
    ]
    sampling = Sampling(
        max_new_tokens=TURNS * TURN,
        stop_ids=STOPS,
        max_turns=TURNS,
        max_turn_tokens=TURN,
        max_context=CONTEXT,
    )
    sizes: dict[str, Any] = dict(max_new_tokens=TURNS * TURN, max_rows=ROWS)
    kept = NativeEngine(
        cfg, ops, max_prompt_tokens=PROMPT, max_context=CONTEXT, max_reply_tokens=160, **sizes
    )
    anew = NativeEngine(cfg, ops, max_prompt_tokens=1024, max_new_tokens=TURN, max_rows=ROWS)
    for engine in (kept, anew):
        engine.load(params, 0)

    def environment() -> ScriptedEnvironment:
        return ScriptedEnvironment(250, turns=TURNS, shortest=100, longest=160)

    def sample_kept(seed: int) -> list[Rollout]:
        return kept.generate(prompts, sampling, seed=seed, environment=environment())

    def sample_anew(seed: int) -> list[Rollout]:
        world = environment()
        episodes = [Episode(prompt, sampling, CONTEXT) for prompt in prompts]
        active = list(range(ROWS))
        single = replace(
            sampling, max_new_tokens=TURN, max_turn_tokens=0, max_turns=1, max_context=0
        )
        while active:
            texts = [
                replace(prompts[i], tokens=(*prompts[i].tokens, *episodes[i].tokens.tolist()))
                for i in active
            ]
            for i, turn in zip(active, anew.generate(texts, single, seed=seed), strict=True):
                episodes[i].add_turn(turn.tokens, turn.rollout_logp, turn.weight_versions)
            continuing = []
            for i in active:
                if episodes[i].stop is None:
                    reply = world.reply(i, episodes[i].last_turn.tolist())
                    if episodes[i].add_reply(reply):
                        continuing.append(i)
            active = continuing
        return [episode.make_rollout() for episode in episodes]

    times: dict[str, list[float]] = {"kept": [], "anew": []}
    for number in range(ROUNDS + 1):
        for name, sample in (("kept", sample_kept), ("anew", sample_anew)):
            start = time.process_time()
            rollouts = sample(number)
            spent = time.process_time() - start
            lengths = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
            label = "compiles" if number == 0 else f"round {number}"
            print(
                f"{label:<9} {name}: {spent:6.2f} CPU-s, "
                f"{sum(r.n_sampled for r in rollouts)} tokens of the policy, "
                f"{np.mean([len(r.turns) for r in rollouts]):.1f} turns, "
                f"longest episode {max(lengths)}",
                flush=True,
            )
            if number:
                times[name].append(spent / sum(r.n_sampled for r in rollouts))
    ratio = np.median(times["kept"]) / np.median(times["anew"])
    print(f"kept cache / prefilled anew: {ratio:.2f} of the CPU seconds per token of the policy")
    print(f"programs compiled: {kept.count_compilations()}; slots of a row: {kept.slots}")


if __name__ == "__main__":
    sys.exit(main())
