# SPDX-License-Identifier: Apache-2.0
"""One batch of the native engine: rows on the device, and their episodes on the host.

All rows sample a turn together. When at most a quarter of them is alive, these continue as a small
batch, so that rows that have ended cost no more time. Rows whose episode goes on keep their cache:
they are put back, and read the environment's replies. Rows whose reply is late wait, and read it
before a later turn. Next: jaxmoe/rollout/native_flow.py refills rows; jaxmoe/rollout/decoding.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import EngineError
from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.parallel.sharding import MeshRules, shard_batch
from jaxmoe.records import Rollout, Sampling, StopReason
from jaxmoe.rollout.decoding import DecodeState
from jaxmoe.rollout.replies import NewContext, SharedReplies, TokenEnvironment
from jaxmoe.rollout.turns import Episode
from jaxmoe.shapes import Params

# The batch shrinks by this factor when few enough rows are alive. Each size is a program of its
# own.
SHRINK_FACTOR = 4
MIN_BATCH_ROWS = 8  # a batch does not shrink below this


@dataclass(frozen=True)
class NativePrograms:
    """Jitted functions of jaxmoe/rollout/decoding.py."""

    decode: Callable[..., DecodeState]
    select: Callable[..., DecodeState]
    restore: Callable[..., DecodeState]
    append: Callable[..., tuple[DecodeState, Any]]
    restart: Callable[..., DecodeState]


@dataclass
class NativeBatch:
    """A batch after its prefill; `rows` are on the device."""

    programs: NativePrograms
    params: Params
    version: int
    sampling: Sampling
    rows: DecodeState
    episodes: dict[int, Episode]  # by row
    append_tokens: int  # tokens of a reply that one call of `append` reads
    mesh: Mesh | None
    rules: MeshRules
    is_closed: Callable[[], bool]

    def __post_init__(self) -> None:
        self._size = int(self.rows.alive_B.shape[0])
        # On a mesh a batch does not shrink, since rows would have to move between devices.
        self._small = shrunk_size(self._size) if self.mesh is None else self._size

    def sample_answers(self) -> list[Rollout]:
        """Return one answer of each row; it ends at its first stop token."""
        self._sample_turn(list(self.episodes), returns=False)
        for episode in self.episodes.values():
            episode.stop = episode.stop or StopReason.STOP_TOKEN
        return [episode.make_rollout() for episode in self.episodes.values()]

    def sample_episodes(self, environment: TokenEnvironment, first: int) -> list[Rollout]:
        """Return one episode of each row; `first` is the number of the first one in its call."""
        replies = SharedReplies(environment, self.is_closed, first)
        active = list(self.episodes)
        while active:
            self._sample_turn(active, returns=True)
            for row in active:
                if self.episodes[row].stop is None:
                    replies.submit(row, self.episodes[row].last_turn.tolist())
            continuing: dict[int, Sequence[int] | NewContext] = {}
            while len(replies) and not continuing:
                for row, reply in replies.wait().items():
                    if self.episodes[row].add_reply(reply):
                        assert not isinstance(reply, StopReason)
                        continuing[row] = reply
            active = sorted(continuing)
            if active:
                self.append_replies(continuing)
                self.start_columns(
                    {row: (e.n_sampled, e.turn_limit) for row, e in self.episodes.items()}
                )
        return [episode.make_rollout() for episode in self.episodes.values()]

    def _sample_turn(self, active: Sequence[int], *, returns: bool) -> None:
        """Sample one turn of the active rows; see `sample_columns`."""
        limits = {row: self.episodes[row].turn_limit for row in active}
        for row, turn in self.sample_columns(limits, returns=returns).items():
            self.add_turn(row, turn)
            self.add_experts(row, turn)

    def add_turn(self, row: int, turn: Mapping[str, np.ndarray]) -> None:
        self.episodes[row].add_turn(
            turn["tokens_BT"], turn["logp_BT"], turn["versions_BT"], turn.get("log_kept_BT")
        )

    def add_experts(self, row: int, turn: Mapping[str, np.ndarray]) -> None:
        """Add the experts of all tokens but the last, which no forward has read."""
        if (experts := turn.get("experts_BTLA")) is not None:
            self.episodes[row].add_experts(experts[:-1])

    def sample_columns(
        self, limits: Mapping[int, int], *, returns: bool
    ) -> dict[int, dict[str, np.ndarray]]:
        """Sample columns of these rows, up to their limits; the others wait or have ended.

        Returns what each row sampled up to its first stop token, by the name of the array.
        returns: rows may continue later, so `rows` is complete again at the end.
        """
        columns, active = self.rows.tokens_BT.shape[1], list(limits)
        rows, sampled, index = self.rows, _Columns(self.rows), np.arange(self._size)
        if returns and len(active) <= self._small < self._size:
            index = self._choose_rows(active)
            rows = self._select(rows, index)
        while True:
            if self.is_closed():
                raise EngineError("the engine was closed while it sampled.")
            smaller = self._next_size(len(index), returns=returns)
            rows = self.programs.decode(
                self.params,
                rows,
                jnp.asarray(self.sampling.stop_ids, jnp.int32),
                jnp.float32(self.sampling.temperature),
                jnp.int32(self.version),
                jnp.float32(self.sampling.explores),
                top_k=self.sampling.top_k,
                top_p=self.sampling.top_p,
                # At the smallest size the loop goes on until no row is alive.
                enough=smaller if smaller < len(index) else 0,
            )
            sampled.store(rows, index)
            alive = np.flatnonzero(gather_to_hosts(rows.alive_B))
            if int(rows.column) == columns or alive.size == 0:
                break
            if returns:
                self.rows = rows
            # Rows that have ended fill up the smaller batch, so that few sizes are ever compiled.
            keep = np.concatenate([alive, np.setdiff1d(np.arange(len(index)), alive)])[:smaller]
            rows, index = self._select(rows, keep), index[keep]
        if returns and len(index) < self._size:
            rows = self.programs.restore(self.rows, rows, jnp.asarray(index, jnp.int32))
        self.rows = rows
        # A row is decoded on until the batch ends, so its first stop token ends the turn.
        is_stop_BT = np.isin(sampled.arrays["tokens_BT"], self.sampling.stop_ids)
        first_B = np.where(is_stop_BT.any(axis=1), is_stop_BT.argmax(axis=1), columns)
        turns: dict[int, dict[str, np.ndarray]] = {}
        for row, limit in limits.items():
            end = min(int(first_B[row]) + 1, limit, columns)
            turns[row] = {name: x[row, :end].copy() for name, x in sampled.arrays.items()}
            turns[row]["versions_BT"] = np.full(end, self.version, np.int32)
        return turns

    def append_replies(self, replies: Mapping[int, Sequence[int] | NewContext]) -> None:
        """Have the rows read these replies, which their episodes have already."""
        new, starts, restarts = (
            dict[int, np.ndarray](),
            dict[int, int](),
            np.zeros(self._size, bool),
        )
        for row, reply in replies.items():
            if isinstance(reply, NewContext):
                new[row], starts[row], restarts[row] = np.asarray(reply.tokens), 0, True
            else:
                # The last token of a turn is in no cache, so the reply begins with it.
                new[row] = np.concatenate([self.episodes[row].last_turn[-1:], reply])
                starts[row] = self.episodes[row].context_length - len(new[row])
        if restarts.any():
            (restarts_B,) = shard_batch((jnp.asarray(restarts),), self.mesh, self.rules)
            self.rows = self.programs.restart(self.rows, restarts_B)
        for offset in range(0, max(map(len, new.values())), self.append_tokens):
            parts = {
                row: tokens[offset : offset + self.append_tokens]
                for row, tokens in new.items()
                if len(tokens) > offset
            }
            self.append_part(
                parts, {row: starts[row] + offset for row in parts}, self.append_tokens
            )

    def start_columns(self, counts_and_limits: Mapping[int, tuple[int, int]]) -> None:
        """Begin at column 0, with the number of tokens that each row sampled so far, and the
        largest number of those that follow."""
        counts, limits = np.zeros((2, self._size), np.int32)
        for row, pair in counts_and_limits.items():
            counts[row], limits[row] = pair
        n_sampled_B, limit_B, column = shard_batch(
            (jnp.asarray(counts), jnp.asarray(limits), jnp.zeros((), jnp.int32)),
            self.mesh,
            self.rules,
        )
        self.rows = replace(self.rows, n_sampled_B=n_sampled_B, limit_B=limit_B, column=column)

    def append_part(
        self, parts: Mapping[int, np.ndarray], starts: Mapping[int, int], width: int
    ) -> None:
        """Have rows read at most `width` tokens each, which begin at these positions."""
        # A copy of rows costs more than the forward of a single token that it saves.
        is_small = len(parts) <= self._small < self._size and width > 1
        index = self._choose_rows(list(parts)) if is_small else np.arange(self._size)
        tokens = np.zeros((len(index), width), np.int32)
        lengths, positions = np.zeros((2, len(index)), np.int32)
        for i, row in enumerate(index):
            if (part := parts.get(int(row))) is not None:
                tokens[i, : len(part)] = part
                lengths[i], positions[i] = len(part), starts[int(row)]
        placed = shard_batch(
            tuple(map(jnp.asarray, (tokens, lengths, positions))), self.mesh, self.rules
        )
        rows = self._select(self.rows, index) if is_small else self.rows
        rows, experts = self.programs.append(
            self.params, rows, *placed, jnp.int32(self.version), jnp.float32(self.sampling.explores)
        )
        if is_small:
            rows = self.programs.restore(self.rows, rows, jnp.asarray(index, jnp.int32))
        self.rows = rows
        if experts is not None:
            experts_BTLA = gather_to_hosts(experts)
            for i, row in enumerate(index.tolist()):
                if (part := parts.get(row)) is not None:
                    self.episodes[row].add_experts(experts_BTLA[i, : len(part)])

    def _choose_rows(self, rows: Sequence[int]) -> np.ndarray:
        """Indices of a small batch: these rows, filled up with others."""
        remaining = np.setdiff1d(np.arange(self._size), rows)
        return np.concatenate([np.asarray(rows, np.int64), remaining])[: self._small]

    def _select(self, rows: DecodeState, index: np.ndarray) -> DecodeState:
        return self.programs.select(rows, jnp.asarray(index, jnp.int32))

    def _next_size(self, size: int, *, returns: bool) -> int:
        """The size to shrink to, or the same size. Rows that return need a program for each size
        more often, so there is one small size for them."""
        if self.mesh is not None or (returns and size < self._size):
            return size
        return shrunk_size(size)


class _Columns:
    """Host copies of the columns of a turn, for all rows of the batch."""

    def __init__(self, rows: DecodeState) -> None:
        names = ("tokens_BT", "logp_BT", "log_kept_BT", "experts_BTLA")
        self.arrays = {
            name: np.zeros(x.shape, x.dtype)
            for name in names
            if (x := getattr(rows, name)) is not None
        }

    def store(self, rows: DecodeState, index: np.ndarray) -> None:
        for name, array in self.arrays.items():
            array[index] = gather_to_hosts(getattr(rows, name))


def shrunk_size(size: int) -> int:
    """Rows of the batch that continues when a batch of `size` rows has few alive."""
    return max(MIN_BATCH_ROWS, -(-size // SHRINK_FACTOR))
