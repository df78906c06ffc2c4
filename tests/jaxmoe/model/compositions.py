# SPDX-License-Identifier: Apache-2.0
"""The same tokens read in other company: what must not change a bit under invariant numerics.

One forward over padded rows is compared with every other way a token is read in a run: inside a
gradient, a row alone, rows in another order, padding on the left, several sequences packed in a
row, a prefill of some tokens and then decode steps, with and without other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import forward, init_cache, init_params, plain_ops, sequence_logprobs, tiny
from jaxmoe.model.head import drawn_logprobs
from jaxmoe.model.ops import invariant_ops

TEMPERATURE = 0.7  # whose reciprocal is no float


def small(**changes: Any) -> Any:
    """A model of pairwise distinct sizes."""
    sizes = dict(
        vocab_size=61, d_model=40, n_layers=2, n_q_heads=6, n_kv_heads=2, head_dim=8, n_experts=5,
        experts_per_token=3, d_expert=24, sliding_window=9,
    )  # fmt: skip
    return tiny(**(sizes | changes))


@lru_cache
def weights(cfg: Any) -> Any:
    """Sharpened, with biases and sinks that are not 0."""
    params = init_params(jax.random.key(0), cfg)
    noise = jax.random.normal
    return jax.tree.map(lambda x: 1.5 * x + 0.1 * noise(jax.random.key(x.size), x.shape), params)


def rows_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def fields(params: Any, tokens_BT: Any, cfg: Any, ops: Any, **where: Any) -> dict[str, Any]:
    """[B, T, …] of what a forward says of each token."""
    hidden_BTD, _, experts_LBTA = forward(params, tokens_BT, cfg, ops, **where)
    logp_BT, _ = sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops, temperature=TEMPERATURE)
    experts = jnp.moveaxis(experts_LBTA, 0, 2)
    return {"hidden": hidden_BTD, "logp": logp_BT, "experts": experts}


class Readings:
    """The ways to read some rows, jitted once for a set of pieces."""

    def __init__(self, cfg: Any, ops: Any) -> None:
        self.cfg, self.params = cfg, weights(cfg)
        read = partial(fields, cfg=cfg, ops=ops)
        self.read = jax.jit(read)

        def loss(params: Any, tokens_BT: Any, **where: Any) -> Any:
            found = read(params, tokens_BT, **where)
            return jnp.sum(found["logp"]), found

        self.graded = jax.jit(jax.value_and_grad(loss, has_aux=True))

        def step(
            params: Any, tokens_BT: Any, positions_BT: Any, segments_BT: Any, cache: Any
        ) -> Any:
            hidden_BTD, cache, experts = forward(
                params, tokens_BT, cfg, ops, positions_BT=positions_BT,
                segment_ids_BT=segments_BT, cache=cache,
            )  # fmt: skip
            return hidden_BTD, jnp.moveaxis(experts, 0, 2), cache

        self.step = jax.jit(step)
        self.drawn = jax.jit(
            lambda params, hidden, token, temperature: drawn_logprobs(
                params, jnp.zeros(len(token)), None, hidden, token, cfg, ops, temperature
            )[0]
        )

    def padded(self, rows: Sequence[np.ndarray], length: int, left: bool = False) -> Any:
        tokens = np.zeros((len(rows), length), np.int32)
        positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
        for i, row in enumerate(rows):
            start = length - len(row) if left else 0
            here = slice(start, start + len(row))
            tokens[i, here], segments[i, here] = row, 1
            positions[i, here] = np.arange(len(row))
        return tokens, {"positions_BT": positions, "segment_ids_BT": segments}

    def whole(self, rows: Sequence[np.ndarray], length: int, *, left=False, graded=False) -> Any:
        """Of each row its fields, from one padded batch."""
        tokens, where = self.padded(rows, length, left)
        found = self.read(self.params, tokens, **where)
        if graded:
            found = self.graded(self.params, tokens, **where)[0][1]
        return _cut(found, rows, where["segment_ids_BT"] == 1)

    def packed(self, rows: Sequence[np.ndarray], start: int, gap: int, length: int) -> Any:
        """All rows in one, from slot `start` on, `gap` slots of padding between them."""
        tokens, positions, segments = (np.zeros((1, length), np.int32) for _ in range(3))
        for i, row in enumerate(rows):
            here = slice(start, start + len(row))
            tokens[0, here], segments[0, here] = row, i + 1
            positions[0, here] = np.arange(len(row))
            start += len(row) + gap
        found = self.read(self.params, tokens, positions_BT=positions, segment_ids_BT=segments)
        return [{n: np.asarray(x)[0][segments[0] == i + 1] for n, x in found.items()}
                for i in range(len(rows))]  # fmt: skip

    def sampled(self, rows: Sequence[np.ndarray], prompt: int, room: int, slots: int) -> Any:
        """As the engine reads them: `prompt` tokens at once, padded to `room`, then one by one."""
        cache = init_cache(self.cfg, len(rows), slots)
        first = [row[:prompt] for row in rows]
        tokens, where = self.padded(first, room)
        hidden, experts, cache = self.step(
            self.params, tokens, where["positions_BT"], where["segment_ids_BT"], cache
        )
        held = [[np.asarray(hidden)[i, : len(f)]] for i, f in enumerate(first)]
        sent = [[np.asarray(experts)[i, : len(f)]] for i, f in enumerate(first)]
        for t in range(prompt, max(map(len, rows))):
            alive = np.array([t < len(row) for row in rows])
            token = np.array([row[t] if t < len(row) else 0 for row in rows], np.int32)
            hidden, experts, cache = self.step(
                self.params, token[:, None], np.full((len(rows), 1), t, np.int32),
                alive[:, None].astype(np.int32), cache,
            )  # fmt: skip
            for i in np.flatnonzero(alive):
                held[i].append(np.asarray(hidden)[i])
                sent[i].append(np.asarray(experts)[i])
        out = []
        for row, h, e in zip(rows, held, sent, strict=True):
            hidden = np.concatenate(h)
            logp = np.zeros(len(row), np.float32)
            logp[1:] = self.drawn(self.params, hidden[:-1], row[1:], jnp.float32(TEMPERATURE))
            out.append({"hidden": hidden, "logp": logp, "experts": np.concatenate(e)})
        return out


def _cut(found: Any, rows: Sequence[np.ndarray], there: np.ndarray) -> Any:
    return [{n: np.asarray(x)[i][there[i]] for n, x in found.items()} for i in range(len(rows))]


def differing(one: Any, other: Any) -> int:
    """Numbers that are not the same bits; of each row the first log-prob is of no prediction."""
    count = 0
    for a, b in zip(one, other, strict=True):
        for name in a:
            x, y = (np.asarray(z[name]) for z in (a, b))
            if name == "logp":
                x, y = x[1:], y[1:]
            count += int(np.sum(x != y))
    return count


def ways(
    readings: Readings, rows: Sequence[np.ndarray], names: Sequence[str] = ()
) -> dict[str, int]:
    """By name, of all or of these, how many numbers another way to read the rows changes."""
    length = max(map(len, rows))
    base, among = readings.whole(rows, length), 3 + sum(map(len, rows)) + 2 * len(rows)
    found: dict[str, Callable[[], int]] = {
        "in a gradient": lambda: differing(base, readings.whole(rows, length, graded=True)),
        "alone": lambda: differing(base, [readings.whole([r], len(r))[0] for r in rows]),
        "in another order": lambda: differing(base, readings.whole(rows[::-1], length)[::-1]),
        "padded on the left": lambda: differing(base, readings.whole(rows, length + 5, left=True)),
        "packed": lambda: differing(base, readings.packed(rows, 3, 2, among)),
        "sampled": lambda: differing(base, readings.sampled(rows, 4, 8, length + 4)),
        "sampled alone": lambda: differing(base[:1], readings.sampled(rows[:1], 7, 16, length + 9)),
    }
    return {name: found[name]() for name in names or found}


def exact_ops(**changes: Any) -> Any:
    return replace(invariant_ops(plain_ops()), **changes)
