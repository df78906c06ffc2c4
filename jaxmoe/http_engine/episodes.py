# SPDX-License-Identifier: Apache-2.0
"""Episodes on servers: each turn of the policy is a request with everything so far as token ids.

Their prefix caches keep what earlier turns computed. An episode that waits for its environment has
no place among the requests in flight, so a slow reply delays its own episode only.
Next: jaxmoe/rollout/turns.py keeps what is sampled and replied; jaxmoe/rollout/replies.py waits.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from jaxmoe.config import EngineError, ModelConfig
from jaxmoe.http_engine.request import PromptRequest
from jaxmoe.recorded_experts import mark_unknown_experts
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.replies import NewContext, PendingReplies, TokenEnvironment
from jaxmoe.rollout.turns import Episode, check_room

# (episode, request, sampling with the limit of the turn) -> the turn
SampleTurn = Callable[[int, PromptRequest, Sampling], Rollout]


def sample_episodes(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    samples: int,
    environment: TokenEnvironment,
    sample_turn: SampleTurn,
    *,
    cfg: ModelConfig,
    max_context: int,
    places: int,
    is_closed: Callable[[], bool],
) -> list[Rollout]:
    """Return `samples` episodes of each prompt, the samples of a prompt as neighbours.

    places: requests that are in flight at once. The longest episodes go first.
    Raises what an environment or a request raised, and EngineError if the engine is closed.
    """
    episodes = [Episode(p, sampling, max_context) for p in prompts for _ in range(samples)]
    check_room(episodes)
    pending = PendingReplies(environment, is_closed)
    changed = environment.reply_threads.changed
    finished = deque[tuple[int, Future[Rollout]]]()  # guarded by `changed`
    ready = [(_priority(e), number) for number, e in enumerate(episodes)]
    heapq.heapify(ready)
    n_running, n_read = 0, [0] * len(episodes)  # tokens whose experts are known
    pool = ThreadPoolExecutor(max(1, min(places, len(episodes))), "jaxmoe-sample")

    def report(number: int, turn: Future[Rollout]) -> None:
        with changed:
            finished.append((number, turn))
            changed.notify_all()

    try:
        while ready or n_running or len(pending):
            while ready and n_running < places:
                _, number = heapq.heappop(ready)
                e = episodes[number]
                request = PromptRequest(
                    number // samples,
                    e.prompt,
                    number % samples,
                    1,
                    e.n_turns,
                    tuple(e.context.tolist()),
                )
                limited = replace(sampling, max_new_tokens=e.turn_limit)
                turn = pool.submit(sample_turn, number, request, limited)
                turn.add_done_callback(partial(report, number))
                n_running += 1
            pending.wait_for_change(lambda: bool(finished))
            if is_closed():
                raise EngineError("the engine was closed while it sampled episodes.")
            while finished:
                number, turn = finished.popleft()
                n_running -= 1
                n_read[number] = _add_turn(episodes[number], turn.result(), n_read[number], cfg)
                if episodes[number].stop is None:
                    pending.submit(number, episodes[number].last_turn.tolist())
            for number, reply in pending.poll().items():
                if episodes[number].add_reply(reply):
                    if isinstance(reply, NewContext):
                        n_read[number] = min(n_read[number], 0)
                    heapq.heappush(ready, (_priority(episodes[number]), number))
    finally:
        # Requests of minutes may be running after another one failed permanently.
        pool.shutdown(wait=False, cancel_futures=True)
    return [_make_rollout(e, n) for e, n in zip(episodes, n_read, strict=True)]


def _priority(episode: Episode) -> int:
    return -episode.context_length


def _add_turn(episode: Episode, turn: Rollout, n_read: int, cfg: ModelConfig) -> int:
    """Add a sampled turn; return the number of tokens whose experts are known.

    A token's experts are those of the request that read it first: what a server claims for
    tokens in its prefix cache may be zeros.
    """
    n_before = episode.context_length
    episode.add_turn(turn.tokens, turn.rollout_logp, turn.weight_versions, turn.log_kept)
    experts = turn.routed_experts
    if experts is None or n_read < 0:
        return -1
    new = experts[n_read:]
    if episode.n_turns > 1:
        # The reply may be in the cache as well: another episode had the same one.
        new = mark_unknown_experts(
            new, n_experts=cfg.n_experts, prompt_tokens=max(0, n_before - n_read)
        )
    episode.add_experts(new)
    return len(experts)


def _make_rollout(episode: Episode, n_read: int) -> Rollout:
    rollout = episode.make_rollout()
    # Without the experts of one turn, those of the others cannot be replayed.
    return rollout if n_read > 0 else replace(rollout, routed_experts=None)
