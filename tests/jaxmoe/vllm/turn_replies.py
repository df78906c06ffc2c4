# SPDX-License-Identifier: Apache-2.0
"""An environment in token ids for tests of episodes on vLLM."""

import threading
import time

import numpy as np
from vllm_cases import CFG

from jaxmoe.records import StopReason
from jaxmoe.rollout.replies import ReplyThreads


class Replies:
    """Replies of 1 to 9 tokens that depend on the turn alone."""

    patience_s = 0.0

    def __init__(self, *, turns=99, delay_s=0.0, timeout_s=0.0, threads=64, act=None):
        self.turns, self.delay_s, self.reply_timeout_s = turns, delay_s, timeout_s
        self.reply_threads, self.act = ReplyThreads(threads), act
        self.calls = {}  # the turns of each episode, in order
        self.n_waiting = self.most_waiting = 0
        self.lock = threading.Lock()

    def reply(self, episode, turn):
        with self.lock:
            turns = self.calls.setdefault(episode, [])
            turns.append(list(turn))
            self.n_waiting += 1
            self.most_waiting = max(self.most_waiting, self.n_waiting)
        if self.act is not None:
            self.act(episode, len(turns))
        time.sleep(self.delay_s)
        with self.lock:
            self.n_waiting -= 1
        if len(turns) >= self.turns:
            return StopReason.STOP_TOKEN
        rng = np.random.default_rng([len(turns), *turn])
        return rng.integers(0, CFG.vocab_size, int(rng.integers(1, 10))).tolist()
