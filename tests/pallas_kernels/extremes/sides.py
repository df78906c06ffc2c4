# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every operation beside what it must give, in blocks so small that these
few rows cross their borders. Those of one shape and dtype are tried on the same inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention import pallas_gpu as decode_gpu
from pallas_kernels.decode_attention import pallas_tpu as decode_tpu
from pallas_kernels.decode_attention import xla as decode_xla
from pallas_kernels.grouped_matmul import pallas_gpu as matmul_gpu
from pallas_kernels.grouped_matmul import pallas_tpu as matmul_tpu
from pallas_kernels.grouped_matmul import reference as matmul_reference
from pallas_kernels.grouped_matmul import xla as matmul_xla
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import (
    pallas_gpu,
    pallas_tpu,
    pallas_tpu_blocks,
    reference,
    xla,
)
from pallas_kernels.sink_attention.hopper import pallas_gpu_backward
from pallas_kernels.sink_attention.hopper.pallas_gpu_blocks import MosaicTiles
from pallas_kernels.token_logprobs import pallas_gpu as logprobs_gpu
from pallas_kernels.token_logprobs import pallas_tpu as logprobs_tpu
from pallas_kernels.token_logprobs import reference as logprobs_reference
from pallas_kernels.token_logprobs import xla as logprobs_xla
from tests.pallas_kernels.extremes import drawn, exact

WINDOW, ALPHA, LIMIT = 9, 1.702, 7.0
WORDS, TEMPERATURE = 277, 0.75
SMALL: dict[Any, dict[str, Any]] = {
    xla: {"xla_block_sizes": lambda *_: (8, 8)},
    logprobs_xla: {"TOKEN_BLOCK": 16, "VOCAB_BLOCK": 128},
    pallas_tpu_blocks: {"tpu_block_sizes": lambda *_: (16, 8, 8)},
    logprobs_tpu: {"CHUNK": 256},
    decode_tpu: {"KEYS": 64},
    pallas_gpu: {"mosaic_forward_tiles": lambda *_: MosaicTiles(3, 32, 2)},
    pallas_gpu_backward: {
        "mosaic_dq_tiles": lambda *_: MosaicTiles(1, 32, 2),
        "mosaic_dkv_tiles": lambda *_: MosaicTiles(1, 32, 3),
    },
    logprobs_gpu: {"STAGES": 2, "GROUP": 1, "count_gpu_cores": lambda: 4, "CHUNK": 512},
    decode_gpu: {"SPLIT": 256},
}


class Side(NamedTuple):
    """One operation at one size: its implementations, its inputs, what is right."""

    run: dict[str, Callable[..., Any]]  # of cotangents and inputs: values and every gradient
    draw: Callable[..., Any]  # of a generator and a dtype: inputs, cotangents
    right: Callable[..., Any]  # of inputs, cotangents and eps: {name: (value, ulp)}
    low: Callable[..., Any] | None = None  # as `draw`, all scores far below zero


def differentiated(f, n):
    """Values and the gradients of the first n arguments, of a new function each time."""

    def run(cotangents, *inputs):
        out, pull = jax.vjp(lambda *some: f(*some, *inputs[n:]), *inputs[:n])
        is_array = not isinstance(out, tuple)
        return *((out,) if is_array else out), *pull(cotangents[0] if is_array else cotangents)

    return jax.jit(run)


def attention(sizes, **implementations):
    def run(f):
        def placed(q, k, v, sink, *places):
            return f(q, k, v, sink, Layout(*places), WINDOW, sizes[-1] ** -0.5)

        return differentiated(placed, 4)

    oracle = partial(exact.attention, WINDOW)
    return Side(
        {k: run(f) for k, f in implementations.items()},
        partial(drawn.attention, sizes=sizes),
        oracle,
    )


def decoding(sizes, **implementations):
    def run(f):
        def placed(_, q, k, v, sink, *places):
            return f(q, k, v, sink, Layout(*places), WINDOW, sizes[-1] ** -0.5)

        return jax.jit(placed)

    side = attention(sizes)
    return side._replace(run={k: run(f) for k, f in implementations.items()})


def logprobs(sizes, **implementations):
    def run(f):
        return differentiated(lambda h, w, t: f(h, w, t, jnp.float32(TEMPERATURE), WORDS), 2)

    def oracle_logprobs(inputs, cotangents, eps):
        expected = exact.logprobs(TEMPERATURE, WORDS, inputs, cotangents, eps)
        padding = (0, 0), (0, sizes[2] - WORDS)  # gets no gradient
        return expected | {"dw_head": tuple(np.pad(x, padding) for x in expected["dw_head"])}

    return Side(
        {k: run(f) for k, f in implementations.items()},
        partial(drawn.logprobs, sizes=(*sizes, WORDS)),
        oracle_logprobs,
        partial(drawn.low_logprobs, sizes=(*sizes, WORDS)),
    )


def matmul(sizes, **implementations):
    def run(f):
        return differentiated(lambda lhs, rhs, bias, groups: f(lhs, rhs, groups, bias), 3)

    return Side(
        {k: run(f) for k, f in implementations.items()},
        partial(drawn.matmul, sizes=sizes),
        exact.matmul,
    )


def swiglu(sizes, **implementations):
    side = matmul(
        sizes,
        **{k: partial(lambda f, *x: f(*x, ALPHA, LIMIT), f) for k, f in implementations.items()},
    )
    return side._replace(
        draw=partial(drawn.matmul, sizes=sizes, halves=2), right=partial(exact.swiglu, ALPHA, LIMIT)
    )


PLAIN = {
    "sink_attention": lambda: attention(
        (2, 21, 29, 6, 2, 16),
        reference=reference.sink_attention_reference,
        xla=xla.sink_attention_xla,
    ),
    "decode_attention": lambda: decoding((3, 2, 61, 6, 2, 16), xla=decode_xla.decode_attention_xla),
    "token_logprobs": lambda: logprobs(
        (29, 16, 300),
        reference=logprobs_reference.token_logprobs_reference,
        xla=logprobs_xla.token_logprobs_xla,
    ),
    "grouped_matmul": lambda: matmul(
        (61, 32, 24, 5),
        reference=matmul_reference.grouped_matmul_reference,
        xla=matmul_xla.grouped_matmul_xla,
    ),
    "grouped_swiglu": lambda: swiglu(
        (61, 32, 24, 5),
        reference=matmul_reference.grouped_swiglu_reference,
        xla=matmul_xla.grouped_swiglu_xla,
    ),
}
TPU = {
    "sink_attention": lambda: attention(
        (2, 21, 29, 6, 2, 16),
        mosaic_tpu=partial(pallas_tpu.sink_attention_mosaic_tpu, interpret=True),
    ),
    "decode_attention": lambda: decoding(
        (2, 3, 72, 10, 2, 64),
        mosaic_tpu=partial(decode_tpu.decode_attention_mosaic_tpu, interpret=True),
    ),
    "token_logprobs": lambda: logprobs(
        (29, 16, 300), mosaic_tpu=partial(logprobs_tpu.token_logprobs_mosaic_tpu, interpret=True)
    ),
    "grouped_matmul": lambda: matmul(
        (61, 128, 128, 5), mosaic_tpu=partial(matmul_tpu.grouped_matmul_mosaic_tpu, interpret=True)
    ),
    "grouped_swiglu": lambda: swiglu(
        (61, 128, 256, 5), mosaic_tpu=partial(matmul_tpu.grouped_swiglu_mosaic_tpu, interpret=True)
    ),
}
GPU = {
    "sink_attention": lambda: attention(
        (2, 45, 61, 2, 1, 64),
        mosaic_gpu=partial(pallas_gpu.sink_attention_mosaic_gpu, interpret=True),
    ),
    "decode_attention": lambda: decoding(
        (2, 3, 72, 10, 2, 64),
        mosaic_gpu=partial(decode_gpu.decode_attention_mosaic_gpu, interpret=True),
    ),
    "token_logprobs": lambda: logprobs(
        (29, 64, 384), mosaic_gpu=partial(logprobs_gpu.token_logprobs_mosaic_gpu, interpret=True)
    ),
    "grouped_matmul": lambda: matmul(
        (61, 256, 128, 5), mosaic_gpu=partial(matmul_gpu.grouped_matmul_mosaic_gpu, interpret=True)
    ),
    "grouped_swiglu": lambda: swiglu(
        (61, 256, 256, 5), mosaic_gpu=partial(matmul_gpu.grouped_swiglu_mosaic_gpu, interpret=True)
    ),
}
