# SPDX-License-Identifier: Apache-2.0
"""An environment in token ids whose replies are a function of the episode and its turn."""

import time
import zlib

import numpy as np

from jaxmoe.records import StopReason
from jaxmoe.rollout.replies import ReplyThreads


class ScriptedEnvironment:
    """Replies of 1 to `longest` random tokens; `delays_s` makes some of them late."""

    def __init__(
        self,
        vocab_size,
        *,
        turns=5,
        shortest=1,
        longest=40,
        delays_s=(0.0,),
        patience_s=0.0,
        timeout_s=0.0,
        threads=32,
    ):
        self.vocab_size, self.turns = vocab_size, turns
        self.lengths = shortest, longest + 1
        self.delays_s, self.patience_s, self.reply_timeout_s = delays_s, patience_s, timeout_s
        self.reply_threads = ReplyThreads(threads)
        self.calls = []  # (episode, turn) in the order of the calls
        self.counts = {}

    def reply(self, episode, turn):
        self.calls.append((episode, tuple(turn)))
        n = self.counts[episode] = self.counts.get(episode, 0) + 1
        key = zlib.crc32(np.asarray(turn, np.int32).tobytes())
        delay_s = self.delays_s[key % len(self.delays_s)]
        rng = np.random.default_rng([key, episode, n])
        if delay_s:
            time.sleep(delay_s)
        if n >= self.turns:
            return StopReason.STOP_TOKEN
        return rng.integers(20, self.vocab_size, int(rng.integers(*self.lengths))).tolist()
