# SPDX-License-Identifier: Apache-2.0
"""Wall time that slow tools add to a batch of episodes of the native engine.

COMMAND  python -m benchmarks.slow_tools [EPISODES]

A tiny random model speaks 3 turns in each of 256 episodes. The calls of the environment take no
time; then 0.5 s each; then 2 % of them take 20 s, with rollout.patience_s of 1 and 0. Each
schedule runs twice, and the first, which compiles, is not timed. No batch can be quicker than its
slowest chain of calls, which is printed too. There are as many reply threads as episodes.
"""

import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence

import jax
import numpy as np

from jaxmoe.config_file import load_config, override
from jaxmoe.model import init_params, make_ops
from jaxmoe.records import Prompt, Sampling, StopReason
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.rollout.replies import ReplyThreads

TURNS, PROMPT, TURN, REPLY, CONTEXT = 3, 32, 32, 16, 192
STOPS = tuple(range(32, 41))  # a random policy stops after about 28 tokens
SLOW_SHARE, SLOW_S, CALL_S, PATIENCE_S = 0.02, 20.0, 0.5, 1.0


class SlowEnvironment:
    """Replies of random tokens; each call takes `call_s`, and a share of them `slow_s`."""

    reply_timeout_s = 0.0

    def __init__(
        self,
        threads: ReplyThreads,
        vocab_size: int,
        *,
        call_s: float = 0.0,
        slow_share: float = 0.0,
        patience_s: float = 0.0,
    ) -> None:
        self.reply_threads, self.patience_s = threads, patience_s
        self._vocab_size, self._call_s, self._slow_share = vocab_size, call_s, slow_share
        self._counts: dict[int, int] = defaultdict(int)
        self.seconds: dict[int, float] = defaultdict(float)  # of the calls of each episode

    def reply(self, episode: int, turn: Sequence[int]) -> list[int] | StopReason:
        self._counts[episode] += 1
        number = self._counts[episode]
        # The same calls are slow in each schedule, whatever was sampled.
        draw = zlib.crc32(f"{episode} {number}".encode()) / 2**32
        delay_s = SLOW_S if draw < self._slow_share else self._call_s
        self.seconds[episode] += delay_s
        time.sleep(delay_s)
        if number >= TURNS:
            return StopReason.STOP_TOKEN
        rng = np.random.default_rng([episode, number])
        return rng.integers(50, self._vocab_size, REPLY).tolist()


def main() -> None:
    n_episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    config = override(load_config("tiny.py"), f"model.max_context={CONTEXT}")
    engine = NativeEngine(
        config.model,
        make_ops(config),
        max_prompt_tokens=PROMPT,
        max_new_tokens=TURNS * TURN,
        max_rows=n_episodes,
        max_context=CONTEXT,
        max_reply_tokens=REPLY,
    )
    engine.load(init_params(jax.random.key(0), config.model), 0)
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(i, "", tuple(rng.integers(50, 250, PROMPT).tolist()), None)
        for i in range(n_episodes)
    ]
    sampling = Sampling(
        max_new_tokens=TURNS * TURN,
        stop_ids=STOPS,
        max_turns=TURNS,
        max_turn_tokens=TURN,
        max_context=CONTEXT,
    )
    threads = ReplyThreads(n_episodes)

    def sample(**options: float) -> tuple[float, float, float]:
        """Wall seconds, mean turns of an episode, and seconds of the slowest chain of calls."""
        environment = SlowEnvironment(threads, 250, **options)
        start = time.perf_counter()
        rollouts = engine.generate(prompts, sampling, seed=1, environment=environment)
        wall_s = time.perf_counter() - start
        turns = float(np.mean([len(r.turns) for r in rollouts]))
        return wall_s, turns, max(environment.seconds.values(), default=0.0)

    schedules = {
        "no delay": {},
        f"{CALL_S} s each": {"call_s": CALL_S},
        f"{SLOW_SHARE:.0%} of {SLOW_S:g} s, patience {PATIENCE_S:g} s": {
            "slow_share": SLOW_SHARE,
            "patience_s": PATIENCE_S,
        },
        f"{SLOW_SHARE:.0%} of {SLOW_S:g} s, no patience": {"slow_share": SLOW_SHARE},
    }
    sample()  # compiles
    base_s = 0.0
    for name, options in schedules.items():
        if "patience_s" in options:
            sample(**options)  # late rows need further programs
        wall_s, turns, chain_s = sample(**options)
        base_s = base_s or wall_s
        print(
            f"{name:<32} {wall_s:7.2f} s, {turns:.2f} turns; {(wall_s - base_s) / TURNS:6.2f} s "
            f"more per turn, {wall_s / base_s:5.2f} x; slowest chain of calls {chain_s:5.1f} s "
            f"({max(base_s, chain_s) / base_s:.2f} x at least)",
            flush=True,
        )
    print(f"programs compiled: {engine.count_compilations()}")


if __name__ == "__main__":
    main()
