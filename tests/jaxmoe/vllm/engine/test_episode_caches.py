# SPDX-License-Identifier: Apache-2.0
"""Episodes on servers with a prefix cache: experts of cached tokens, the server of each turn."""

import base64
import io
from contextlib import closing

import numpy as np
from episode_cases import CONTEXT, LONG, compare_with_trainer, open_loaded
from stand_in import StandIn
from turn_replies import Replies
from vllm_cases import CFG, open_engine, prompts, weights


class Caching(StandIn):
    """Claims experts of zeros for tokens that an earlier request read, as a prefix cache may."""

    def __init__(self, *args, **options):
        self.read = []
        super().__init__(*args, **options)

    def do_generate(self, body, query):
        prompt = body["token_ids"]
        n_cached = max((_common(prompt, ids) for ids in self.read), default=0)
        self.n_cached = n_cached
        answer = super().do_generate(body, query)
        for choice in answer["choices"]:
            self.read.append([*prompt, *choice["token_ids"][:-1]])
            choice["routed_experts"] = _zero_experts(choice["routed_experts"], n_cached)
        return answer


def _common(a, b):
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.array(a[:n]) != np.array(b[:n]))
    return int(differs[0]) if differs.size else n


def _zero_experts(encoded, n):
    array = np.load(io.BytesIO(base64.b64decode(encoded))).copy()
    array[:n] = 0
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_experts_are_of_the_request_that_read_first(tmp_path):
    server = Caching(CFG, context=CONTEXT + 1)
    with closing(open_loaded(server, tmp_path)) as opened:
        server.read.clear()
        out = opened.generate(prompts(3), LONG, seed=1, environment=Replies())
    assert server.n_cached > 0 and max(len(r.turns) for r in out) > 2
    assert compare_with_trainer(out) < 5e-5  # and the experts of all read tokens
    server.crash()


def test_turns_go_to_the_server_with_their_cache(tmp_path):
    servers = [StandIn(CFG, context=CONTEXT + 1) for _ in range(2)]
    urls = ",".join(server.url for server in servers)
    with closing(open_engine(urls, tmp_path, max_context=CONTEXT)) as opened:
        opened.load(weights(0), 3)
        first, second = opened._pool.replicas

        def act(episode, turn):
            # A little more work there does not move the episode, much more does.
            first.in_flight = 1 if turn < 3 else 1000

        for server in servers:
            server.requests.clear()
        (episode,) = opened.generate(prompts(1), LONG, seed=1, environment=Replies(act=act))
        first.in_flight = second.in_flight = 0
    assert len(episode.turns) == 5
    assert [len(server.requests) for server in servers] == [3, 2]
    for server in servers:
        server.crash()
