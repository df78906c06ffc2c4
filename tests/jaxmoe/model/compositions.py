# SPDX-License-Identifier: Apache-2.0
"""The same tokens read in other batches: what must not change a bit under invariant numerics."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import forward, init_cache, plain_ops, sequence_logprobs, tiny
from jaxmoe.model.head import sampled_logprobs
from jaxmoe.model.ops import invariant_ops
from tests.jaxmoe.random_weights import random_weights

TEMPERATURE = 0.7  # whose reciprocal is no float


def small_config(**changes: Any) -> Any:
    """A model of pairwise distinct sizes."""
    sizes = dict(
        vocab_size=61,
        d_model=40,
        n_layers=2,
        n_q_heads=6,
        n_kv_heads=2,
        head_dim=8,
        n_experts=5,
        experts_per_token=3,
        d_expert=24,
        sliding_window=9,
    )
    return tiny(**(sizes | changes))


@lru_cache
def make_weights(cfg: Any) -> Any:
    """Sharpened, with biases and sinks that are not 0."""
    return jax.tree.map(lambda x: 1.5 * x, random_weights(cfg, 0))


def make_rows(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def compute_fields(
    params: Any, tokens_BT: Any, cfg: Any, ops: Any, **layout: Any
) -> dict[str, Any]:
    """[B, T, …] of what a forward says of each token."""
    hidden_BTD, _, recorded = forward(params, tokens_BT, cfg, ops, **layout)
    logp_BT, _ = sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops, temperature=TEMPERATURE)
    experts = jnp.moveaxis(recorded["experts_BTA"], 0, 2)
    return {"hidden": hidden_BTD, "logp": logp_BT, "experts": experts}


class Readings:
    """The ways to read some rows, jitted once for a set of pieces."""

    def __init__(self, cfg: Any, ops: Any) -> None:
        self.cfg, self.params = cfg, make_weights(cfg)
        read = partial(compute_fields, cfg=cfg, ops=ops)
        self.read = jax.jit(read)

        def loss(params: Any, tokens_BT: Any, **layout: Any) -> Any:
            fields = read(params, tokens_BT, **layout)
            return jnp.sum(fields["logp"]), fields

        self.graded = jax.jit(jax.value_and_grad(loss, has_aux=True))

        def step(
            params: Any, tokens_BT: Any, positions_BT: Any, segments_BT: Any, cache: Any
        ) -> Any:
            hidden_BTD, cache, recorded = forward(
                params,
                tokens_BT,
                cfg,
                ops,
                positions_BT=positions_BT,
                segment_ids_BT=segments_BT,
                cache=cache,
            )
            return hidden_BTD, jnp.moveaxis(recorded["experts_BTA"], 0, 2), cache

        self.step = jax.jit(step)
        self.sampled_logprobs = jax.jit(
            lambda params, hidden, token, temperature: sampled_logprobs(
                params, jnp.zeros(len(token)), None, hidden, token, cfg, ops, temperature
            )[0]
        )

    def pad_rows(self, rows: Sequence[np.ndarray], length: int, pad_left: bool = False) -> Any:
        tokens = np.zeros((len(rows), length), np.int32)
        positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
        for i, row in enumerate(rows):
            start = length - len(row) if pad_left else 0
            columns = slice(start, start + len(row))
            tokens[i, columns], segments[i, columns] = row, 1
            positions[i, columns] = np.arange(len(row))
        return tokens, {"positions_BT": positions, "segment_ids_BT": segments}

    def read_full(
        self, rows: Sequence[np.ndarray], length: int, *, pad_left=False, graded=False
    ) -> Any:
        """Return each row's fields, from one padded batch."""
        tokens, layout = self.pad_rows(rows, length, pad_left)
        fields = self.read(self.params, tokens, **layout)
        if graded:
            fields = self.graded(self.params, tokens, **layout)[0][1]
        return _cut_rows(fields, rows, layout["segment_ids_BT"] == 1)

    def read_packed(self, rows: Sequence[np.ndarray], start: int, gap: int, length: int) -> Any:
        """All rows in one, from slot `start` on, `gap` slots of padding between them."""
        tokens, positions, segments = (np.zeros((1, length), np.int32) for _ in range(3))
        for i, row in enumerate(rows):
            columns = slice(start, start + len(row))
            tokens[0, columns], segments[0, columns] = row, i + 1
            positions[0, columns] = np.arange(len(row))
            start += len(row) + gap
        fields = self.read(self.params, tokens, positions_BT=positions, segment_ids_BT=segments)
        return [
            {n: np.asarray(x)[0][segments[0] == i + 1] for n, x in fields.items()}
            for i in range(len(rows))
        ]

    def read_sampled(self, rows: Sequence[np.ndarray], prompt: int, room: int, slots: int) -> Any:
        """Read as the engine does: `prompt` tokens at once, padded to `room`, then one by one."""
        cache = init_cache(self.cfg, len(rows), slots)
        first = [row[:prompt] for row in rows]
        tokens, layout = self.pad_rows(first, room)
        hidden, experts, cache = self.step(
            self.params, tokens, layout["positions_BT"], layout["segment_ids_BT"], cache
        )
        decoded = [[np.asarray(hidden)[i, : len(f)]] for i, f in enumerate(first)]
        sent = [[np.asarray(experts)[i, : len(f)]] for i, f in enumerate(first)]
        for t in range(prompt, max(map(len, rows))):
            alive = np.array([t < len(row) for row in rows])
            token = np.array([row[t] if t < len(row) else 0 for row in rows], np.int32)
            hidden, experts, cache = self.step(
                self.params,
                token[:, None],
                np.full((len(rows), 1), t, np.int32),
                alive[:, None].astype(np.int32),
                cache,
            )
            for i in np.flatnonzero(alive):
                decoded[i].append(np.asarray(hidden)[i])
                sent[i].append(np.asarray(experts)[i])
        out = []
        for row, h, e in zip(rows, decoded, sent, strict=True):
            hidden = np.concatenate(h)
            logp = np.zeros(len(row), np.float32)
            logp[1:] = self.sampled_logprobs(
                self.params, hidden[:-1], row[1:], jnp.float32(TEMPERATURE)
            )
            out.append({"hidden": hidden, "logp": logp, "experts": np.concatenate(e)})
        return out


def _cut_rows(fields: Any, rows: Sequence[np.ndarray], mask: np.ndarray) -> Any:
    return [{n: np.asarray(x)[i][mask[i]] for n, x in fields.items()} for i in range(len(rows))]


def count_differing(actual: Any, expected: Any) -> int:
    """Numbers that are not the same bits; of each row the first log-prob is of no prediction."""
    count = 0
    for a, b in zip(actual, expected, strict=True):
        for name in a:
            x, y = (np.asarray(z[name]) for z in (a, b))
            if name == "logp":
                x, y = x[1:], y[1:]
            count += int(np.sum(x != y))
    return count


def count_changes(
    readings: Readings, rows: Sequence[np.ndarray], names: Sequence[str] = ()
) -> dict[str, int]:
    """Return, by name, the count of values that another way of reading the rows changes."""
    length = max(map(len, rows))
    base, among = readings.read_full(rows, length), 3 + sum(map(len, rows)) + 2 * len(rows)
    counts: dict[str, Callable[[], int]] = {
        "in a gradient": lambda: count_differing(
            base, readings.read_full(rows, length, graded=True)
        ),
        "alone": lambda: count_differing(base, [readings.read_full([r], len(r))[0] for r in rows]),
        "in another order": lambda: count_differing(
            base, readings.read_full(rows[::-1], length)[::-1]
        ),
        "padded on the left": lambda: count_differing(
            base, readings.read_full(rows, length + 5, pad_left=True)
        ),
        "packed": lambda: count_differing(base, readings.read_packed(rows, 3, 2, among)),
        "sampled": lambda: count_differing(base, readings.read_sampled(rows, 4, 8, length + 4)),
        "sampled alone": lambda: count_differing(
            base[:1], readings.read_sampled(rows[:1], 7, 16, length + 9)
        ),
    }
    return {name: counts[name]() for name in names or counts}


def exact_ops(**changes: Any) -> Any:
    return replace(invariant_ops(plain_ops()), **changes)
