# SPDX-License-Identifier: Apache-2.0
"""The native engine with rows that are refilled, under weights that may change in flight.

One thread decodes the answers of all calls of `generate`, a chunk of columns at a time. A row that
ends gives its place to the next answer, so that a long answer keeps no other row idle. New weights
take effect between two chunks, also for answers that have begun: their keys and values stay, or are
computed again. Next: jaxmoe/rollout/native_turns.py samples the columns of a chunk.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import EngineError, ModelConfig
from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.model import Ops, init_cache
from jaxmoe.model.cache import own_slots
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from jaxmoe.rollout.decoding import init_rows
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.flow_rows import FlowRequest, FlowRow, pending_replies
from jaxmoe.rollout.native import NativeEngine, random_streams, to_device
from jaxmoe.rollout.native_prompts import pad_tokens
from jaxmoe.rollout.native_turns import NativeBatch, shrunk_size
from jaxmoe.rollout.replies import NewContext, PendingReplies, TokenEnvironment
from jaxmoe.shapes import Params

# Columns that are decoded before rows are refilled and new weights are read. A row that ends is
# idle for half a chunk on average, and each chunk costs a copy of its columns to the host.
CHUNK_TOKENS = 16


class FlowEngine(NativeEngine):
    """A NativeEngine whose `pin` is an engine of refilled rows that follow new weights.

    `generate` itself, for evaluations, samples batches of their own. `recompute`: the keys and
    values of unfinished answers are computed again with new weights.
    """

    def __init__(self, cfg: ModelConfig, ops: Ops, *, recompute: bool, **sizes: Any) -> None:
        super().__init__(cfg, ops, **sizes)
        self._flow = NativeFlow(self, cfg, recompute=recompute)

    def pin(self) -> Engine:
        return self._flow

    def close(self) -> None:
        super().close()
        self._flow.wake()


class NativeFlow:
    """An Engine over refilled rows; several threads may call `generate` at once."""

    incidents: Sequence[str] = ()

    def __init__(self, engine: NativeEngine, cfg: ModelConfig, *, recompute: bool) -> None:
        self._engine, self._cfg, self._recompute = engine, cfg, recompute
        self._changed = threading.Condition()  # guards the next five
        self._requests = set[FlowRequest]()  # without a result
        self._waiting: deque[FlowRow] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        # The thread's own. The first call decides how many rows there are, and how they sample.
        self._rows: dict[int, FlowRow] = {}  # by place
        self._size, self._sampling = 0, Sampling(0, ())
        self._loaded: tuple[Params, int] | None = None
        self._weights: tuple[Params, int] = {}, -1  # those on the device
        self._batch: NativeBatch | None = None
        # The last prompt's cache: its other samples may get their places later.
        self._prefilled: tuple[Any, Any] = None, None

    def load(self, params: Params, version: int) -> None:
        self._engine.load(params, version)

    def close(self) -> None:
        self._engine.close()

    def wake(self) -> None:
        """Have the thread see that the engine is closed."""
        with self._changed:
            self._changed.notify_all()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        environment: TokenEnvironment | None = None,
    ) -> list[Rollout]:
        """Return rollouts as NativeEngine.generate, each token by the newest weights at its chunk.

        All calls must have one `samples` and, but for limits, one sampling.
        """
        sampling = self._engine.check_sampling(sampling, environment)
        self._engine.read_loaded()
        episodes = self._engine.open_episodes(prompts, sampling, samples)
        streams_B2 = np.asarray(random_streams(seed, 0, len(episodes)))
        replies = (
            None if environment is None else PendingReplies(environment, self._engine.is_closed)
        )
        request = FlowRequest([None] * len(episodes), replies)
        chunks = replace(
            sampling, max_new_tokens=CHUNK_TOKENS, max_turns=1, max_turn_tokens=0, max_context=0
        )
        with self._changed:
            self._raise_error()
            size = self._engine.prompts_per_batch(samples) * samples
            if self._thread is None:
                self._size, self._sampling = size, chunks
                # A daemon, so that a second Ctrl-C does not wait for it.
                self._thread = threading.Thread(target=self._run, name="flow", daemon=True)
                self._thread.start()
            if (size, chunks) != (self._size, self._sampling):
                raise ValueError(
                    "all calls must have the samples and the sampling of the first, but for "
                    f"limits: {self._sampling}; got {chunks}. Open another engine for these."
                )
            self._requests.add(request)
            self._waiting.extend(
                FlowRow(request, i, episode, streams_B2[i]) for i, episode in enumerate(episodes)
            )
            self._changed.notify_all()
        request.is_over.wait()
        rollouts = [rollout for rollout in request.rollouts if rollout is not None]
        if len(rollouts) < len(episodes):
            self._raise_error()
        return rollouts

    def _raise_error(self) -> None:
        if self._error is not None:
            # Several threads raise it, and each would add to its traceback.
            raise self._error.with_traceback(self._trace)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._engine.is_closed() or self._waiting or self._rows
                    )
                if self._engine.is_closed():
                    raise EngineError("the engine was closed while it sampled.")
                self._sample_chunk()
        # Whatever it is, each thread that waits raises it, since none would ever get its answers.
        except BaseException as error:
            with self._changed:
                self._error, self._trace = error, error.__traceback__
                for request in self._requests:
                    request.is_over.set()

    def _sample_chunk(self) -> None:
        """Sample one chunk of each row that has a place and does not wait for its environment."""
        with self._changed:
            # Answers that come after the weights were read may need newer ones.
            n_placeable = len(self._waiting)
        # Read once for a chunk, even if another thread calls load() meanwhile.
        loaded = self._engine.read_loaded()
        if loaded is not self._loaded:
            self._loaded, self._weights = loaded, to_device(loaded)
            self._prefilled = None, None
            if self._batch is not None:
                self._batch.params, self._batch.version = self._weights
                if self._recompute:
                    self._compute_keys()
        self._read_replies()
        self._fill_places(n_placeable)
        active = {place: row for place, row in self._rows.items() if not row.waits}
        batch = self._batch
        if not active or batch is None:
            self._wait_for_replies()
            return
        # No forward follows the last column of a chunk. Its token is read here, at the price of the
        # forward that is missing there, so that the weights of the next chunk read it.
        unread = {place: row for place, row in active.items() if row.parts}
        if unread:
            batch.append_part(
                {place: row.parts[-1]["tokens_BT"][-1:] for place, row in unread.items()},
                {place: row.length - 1 for place, row in unread.items()},
                1,
            )
        limits = {place: row.episode.turn_limit - row.n_in_turn for place, row in active.items()}
        batch.start_columns(
            {place: (row.n_sampled, limits[place]) for place, row in active.items()}
        )
        for place, part in batch.sample_columns(limits, returns=True).items():
            batch.add_experts(place, part)
            self._add_part(place, part)

    def _add_part(self, place: int, part: dict[str, np.ndarray]) -> None:
        """Add what a row sampled in a chunk; end its turn at a stop token or the limit."""
        row, batch = self._rows[place], self._batch
        assert batch is not None
        row.parts.append(part)
        is_over = int(part["tokens_BT"][-1]) in self._sampling.stop_ids
        if not (is_over or row.n_in_turn == row.episode.turn_limit):
            return
        names = part.keys() - {"experts_BTLA"}
        turn = {name: np.concatenate([part[name] for part in row.parts]) for name in names}
        batch.add_turn(place, turn)
        row.parts.clear()
        replies, episode = row.request.replies, row.episode
        if replies is None:
            episode.stop = episode.stop or StopReason.STOP_TOKEN
        elif episode.stop is None:
            replies.submit(row.number, episode.last_turn.tolist())
            row.waits = True
        if episode.stop is not None:
            self._finish(place)

    def _finish(self, place: int) -> None:
        row = self._rows.pop(place)
        row.request.rollouts[row.number] = row.episode.make_rollout()
        if all(rollout is not None for rollout in row.request.rollouts):
            with self._changed:
                self._requests.remove(row.request)
            row.request.is_over.set()

    def _read_replies(self) -> None:
        """Have rows read the replies that are there; those whose episode ends leave their place."""
        waiting = {place: row for place, row in self._rows.items() if row.waits}
        ready = {
            request: replies.poll()
            for request, replies in pending_replies(waiting.values()).items()
        }
        continuing: dict[int, Sequence[int] | NewContext] = {}
        for place, row in waiting.items():
            if (reply := ready[row.request].get(row.number)) is None:
                continue
            row.waits = False
            if row.episode.add_reply(reply):
                assert not isinstance(reply, StopReason)
                continuing[place] = reply
            else:
                self._finish(place)
        if continuing:
            assert self._batch is not None
            self._batch.append_replies(continuing)

    def _wait_for_replies(self) -> None:
        pending = list(pending_replies(self._rows.values()).values())
        if pending:
            pending[0].wait_for_change(
                # Answers that wait for a place cannot begin: all places may wait for replies.
                lambda: (
                    (self._waiting and len(self._rows) < self._size)
                    or any(replies.has_reply for replies in pending)
                )
            )

    def _fill_places(self, n_placeable: int) -> None:
        """Give free places to the first rows that wait, in their order."""
        free = deque(place for place in range(self._size) if place not in self._rows)
        while free and n_placeable:
            first, rows = self._waiting[0], dict[int, FlowRow]()
            while free and len(rows) < min(n_placeable, shrunk_size(self._size)):
                row = self._waiting[0]
                if (
                    row.request is not first.request
                    or row.episode.prompt is not first.episode.prompt
                ):
                    break
                with self._changed:
                    rows[free.popleft()] = self._waiting.popleft()
            n_placeable -= len(rows)
            prompt = first.episode.prompt.tokens
            # Its other samples may have got their places before, under the same weights.
            if self._prefilled[0] != prompt:
                self._prefilled = prompt, self._prefill([prompt], 1)
            *prefilled, experts_BTLA = self._prefilled[1]
            self._rows |= rows
            self._place_rows(prefilled, experts_BTLA, [0] * len(rows), rows)
            if experts_BTLA is not None:
                experts_TLA = gather_to_hosts(experts_BTLA)[0, : len(prompt)]
                for row in rows.values():
                    row.episode.add_experts(experts_TLA)

    def _compute_keys(self) -> None:
        """Compute the keys and values of all rows again; the last token of each is read later."""
        width = shrunk_size(self._size)
        # By length, since a call takes as long as its longest row.
        rows = sorted(self._rows.items(), key=lambda item: item[1].length)
        for start in range(0, len(rows), width):
            part = dict(rows[start : start + width])
            *prefilled, experts_BTLA = self._prefill([row.read for row in part.values()], width)
            self._place_rows(prefilled, experts_BTLA, range(len(part)), part)

    def _prefill(
        self, sequences: Sequence[Sequence[int] | np.ndarray], width: int
    ) -> tuple[Any, ...]:
        """Return the cache, the last hidden states, the lengths, and the experts if recorded."""
        params, version = self._weights
        tokens, lengths = pad_tokens(sequences, width, self._engine.slots)
        tokens_BT, lengths_B = jnp.asarray(tokens), jnp.asarray(lengths)
        cache, hidden_BD, experts_BTLA = self._engine.prefill_rows(
            params,
            tokens_BT,
            lengths_B,
            jnp.int32(version),
            jnp.float32(self._sampling.explores),
        )
        return cache, hidden_BD, lengths_B, experts_BTLA

    def _place_rows(
        self,
        prefilled: Sequence[Any],
        experts_BTLA: Any,
        sources: Sequence[int],
        rows: Mapping[int, FlowRow],
    ) -> None:
        """Write prefilled rows with these indices to their places."""
        if self._batch is None:
            self._batch = self._open_batch(prefilled[1], experts_BTLA)
        # Of one number in each call, and a place behind the last one is dropped.
        width = shrunk_size(self._size)
        index, alive, streams = np.zeros(width, np.int32), np.zeros(width, bool), []
        places = np.full(width, self._size, np.int32)
        for i, (place, row) in enumerate(rows.items()):
            index[i], places[i], alive[i] = sources[i], place, not row.waits
            self._batch.episodes[place] = row.episode
            streams.append(row.stream_2)
        streams += [np.zeros(2, np.uint32)] * (width - len(streams))
        placed = map(jnp.asarray, (index, places, alive, np.stack(streams)))
        self._batch.rows = self._engine.place_rows(self._batch.rows, *prefilled, *placed)

    def _open_batch(self, hidden_BD: Any, experts_BTLA: Any) -> NativeBatch:
        """Return a batch of empty places."""
        zeros_B = jnp.zeros(self._size, jnp.int32)
        rows = init_rows(
            jnp.zeros((self._size, hidden_BD.shape[1]), hidden_BD.dtype),
            zeros_B,
            zeros_B > 0,
            jnp.zeros((self._size, 2), jnp.uint32),
            zeros_B,
            experts_BTLA,
            self._sampling,
        )
        cache = own_slots(init_cache(self._cfg, self._size, self._engine.slots), zeros_B)
        # Each array is donated, so none may be another one too.
        rows = jax.tree.map(jnp.copy, replace(rows, cache=cache))
        return self._engine.open_rows(self._weights, self._sampling, rows, {})
