# SPDX-License-Identifier: Apache-2.0
"""Named shapes of the token log-probs, on which every implementation is tested and timed.

Sizes of the test cases are pairwise distinct, so that swapped axes make a test fail.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int


class LogprobsCase(NamedTuple):
    """Shape of one call: M tokens, width D, V columns of which vocab_size are words."""

    name: str
    M: int
    D: int
    V: int
    vocab_size: int
    temperature: float = 1.0


TEST_CASES = (
    LogprobsCase("one_block", 29, 48, 97, 97),
    LogprobsCase("padded_head", 29, 48, 97, 83, 0.7),
    LogprobsCase("token_blocks_overlap", 1100, 16, 97, 97, 1.3),
    LogprobsCase("vocab_blocks_overlap", 29, 16, 4300, 4217, 0.7),
)

# Both sizes of GPT-OSS have this head; kernels are compiled for it.
REAL_CASES = (
    LogprobsCase("gptoss20b", 24576, 2880, 201_216, 201_088),
    LogprobsCase("gptoss20b_8k", 8192, 2880, 201_216, 201_088),
)

LONG_CASES = (LogprobsCase("gptoss_131k", 131_072, 2880, 201_216, 201_088),)

BENCH_CASES = (
    LogprobsCase("tiny", 5120, 128, 512, 512),
    LogprobsCase("tiny_characters", 5120, 128, 265, 265),
    REAL_CASES[0],
)


def init_logprobs_inputs(
    case: LogprobsCase, dtype: DTypeLike = jnp.float32, seed: int | Int[Array, ""] = 0
) -> tuple[Float[Array, "M D"], Float[Array, "D V"], Int[Array, " M"]]:
    """Normal hidden_MD and w_head_DV (logits of deviation 1.5), and targets among the words."""
    hidden_key, head_key, target_key = jax.random.split(jax.random.key(seed), 3)
    w_head_DV = jax.random.normal(head_key, (case.D, case.V)) * (1.5 * case.D**-0.5)
    return (
        jax.random.normal(hidden_key, (case.M, case.D)).astype(dtype),
        w_head_DV.astype(dtype),
        jax.random.randint(target_key, (case.M,), 0, case.vocab_size, jnp.int32),
    )
