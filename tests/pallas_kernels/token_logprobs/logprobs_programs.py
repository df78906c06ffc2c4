# SPDX-License-Identifier: Apache-2.0
"""Token log-probs and their gradients as programs to compile for a chip."""

import jax
import jax.numpy as jnp

from pallas_kernels.token_logprobs import token_logprobs


def arrays(case, dtype=jnp.bfloat16):
    shape = jax.ShapeDtypeStruct
    return (
        shape((case.M, case.D), dtype),
        shape((case.D, case.V), dtype),
        shape((case.M,), jnp.int32),
        shape((), jnp.float32),
    )


def forward(case, impl):
    def run(hidden, w_head, targets, temperature):
        return token_logprobs(
            hidden, w_head, targets, temperature=temperature, vocab_size=case.vocab_size, impl=impl
        )

    return run


def gradients(case, impl):
    run = forward(case, impl)
    return jax.grad(lambda *args: sum(x.sum() for x in run(*args)), argnums=(0, 1))
