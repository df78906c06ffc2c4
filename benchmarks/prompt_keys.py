# SPDX-License-Identifier: Apache-2.0
"""What decoding saves where the samples of a prompt read one copy of its keys.

    python benchmarks/prompt_keys.py [--rounds 7]

Both sides in turn, CPU-seconds: the attention of one layer for a token of each row at the end of
its answer, and all answers of the native engine with tiny.py's model. Each line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.in_turn import measure_in_turn, take_medians
from jaxmoe.config_file import load_config
from jaxmoe.model import init_params, plain_ops
from jaxmoe.model.cache import KVStack, PromptKeys
from jaxmoe.model.prompt_keys import attend_with_prompt
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.native import NativeEngine
from pallas_kernels import decode_attention

N_QUERY_HEADS, N_KEY_HEADS, HEAD_DIM = 8, 4, 16
# prompts, samples of each, tokens of a prompt, tokens of an answer
SIZES = ((16, 16, 64, 6), (8, 8, 512, 64), (4, 8, 2048, 256), (8, 8, 64, 512))


class CopyingEngine(NativeEngine):
    """Every sample has a copy of its prompt's keys."""

    def _shares_prompts(self, samples: int) -> bool:
        return False


class SharingEngine(NativeEngine):
    """Samples read one copy, also where that saves nothing."""

    def _shares_prompts(self, samples: int) -> bool:
        return samples > 1


def make_attention(prompts: int, samples: int, P: int, A: int) -> dict[str, Callable[[], Any]]:
    """Attention of every row to its prompt and its answer, from copies and from one copy."""
    rows, rng = prompts * samples, np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, sink = draw(rows, 1, N_QUERY_HEADS, HEAD_DIM), draw(N_QUERY_HEADS)
    prompt_kv = [draw(prompts, P, N_KEY_HEADS, HEAD_DIM) for _ in range(2)]
    answer_kv = [draw(rows, A, N_KEY_HEADS, HEAD_DIM) for _ in range(2)]
    copies = [
        jnp.concatenate([jnp.repeat(x, samples, axis=0), y], axis=1)
        for x, y in zip(prompt_kv, answer_kv, strict=True)
    ]

    def layout(count: int, first: int, last: int) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(
            jnp.arange(first, last, dtype=jnp.int32), (count, last - first)
        )
        return positions, jnp.ones_like(positions)

    def keywords(first: int) -> dict[str, jax.Array]:
        positions, segments = layout(rows, first, P + A)
        return dict(
            q_positions_BT=positions[:, -1:],
            q_segment_ids_BT=segments[:, -1:],
            k_positions_BS=positions,
            k_segment_ids_BS=segments,
        )

    kind = KVStack(prompt_kv[0][None], prompt_kv[1][None], *layout(prompts, 0, P))
    copied = jax.jit(partial(decode_attention, **keywords(0)))
    shared = jax.jit(
        partial(
            partial(attend_with_prompt, decode_attention, PromptKeys(kind, None, samples)),
            **keywords(P),
        )
    )
    sides = {
        "copied": lambda: jax.block_until_ready(copied(q, *copies, sink)),
        "shared": lambda: jax.block_until_ready(shared(*prompt_kv, q, *answer_kv, sink)),
    }
    difference = float(jnp.abs(sides["copied"]()[0] - sides["shared"]()[0]).max())
    if not difference < 1e-5:
        raise ValueError(f"both sides must agree within 1e-5, got a difference of {difference}")

    def repeat(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [run() for _ in range(20)]

    return {name: repeat(run) for name, run in sides.items()}


def make_answers(prompts: int, samples: int, P: int, A: int) -> dict[str, Callable[[], Any]]:
    """All answers of the engine, which end nowhere."""
    cfg = load_config("tiny.py").model
    params, rng = init_params(jax.random.key(0), cfg), np.random.default_rng(0)
    batch = [
        Prompt(i, "", tuple(rng.integers(1, cfg.vocab_size, P).tolist()), None)
        for i in range(prompts)
    ]
    sides = {}
    for name, engine_class in (("copied", CopyingEngine), ("shared", SharingEngine)):
        engine = engine_class(
            cfg, plain_ops(), max_prompt_tokens=P, max_new_tokens=A, max_rows=prompts * samples
        )
        engine.load(params, 0)
        sides[name] = partial(engine.generate, batch, Sampling(A, ()), seed=0, samples=samples)
        sides[name]()
    return sides


def main() -> None:
    """Print the ratio of medians for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for size in SIZES:
        prompts, samples, P, A = size
        result: dict[str, Any] = {"prompts": prompts, "samples": samples, "prompt": P, "answer": A}
        result["slots"] = round((P + samples * A) / (samples * (P + A)), 3)
        for name, make in (("attention", make_attention), ("answers", make_answers)):
            medians = take_medians(measure_in_turn(make(*size), args.rounds))
            result[name] = round(float(medians["shared"][0] / medians["copied"][0]), 3)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
