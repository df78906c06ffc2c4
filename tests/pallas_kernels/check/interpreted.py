# SPDX-License-Identifier: Apache-2.0
"""Our kernels for chips, interpreted on a CPU, as implementations for a check: module:function."""

import jax.numpy as jnp

from pallas_kernels.bench.ops import OPS
from pallas_kernels.decode_attention import pallas_gpu as decode_gpu
from pallas_kernels.decode_attention import pallas_tpu as decode_tpu
from pallas_kernels.grouped_matmul import pallas_gpu as matmul_gpu
from pallas_kernels.grouped_matmul import pallas_tpu as matmul_tpu
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import pallas_gpu, pallas_tpu
from pallas_kernels.token_logprobs import pallas_gpu as logprobs_gpu
from pallas_kernels.token_logprobs import pallas_tpu as logprobs_tpu

ALPHA, LIMIT = 1.702, 7.0
TPU = {
    "sink_attention": pallas_tpu.sink_attention_mosaic_tpu,
    "decode_attention": decode_tpu.decode_attention_mosaic_tpu,
    "grouped_matmul": matmul_tpu.grouped_matmul_mosaic_tpu,
    "grouped_swiglu": matmul_tpu.grouped_swiglu_mosaic_tpu,
    "grouped_matmul_low_rank": matmul_tpu.grouped_matmul_low_rank_mosaic_tpu,
    "grouped_swiglu_low_rank": matmul_tpu.grouped_swiglu_low_rank_mosaic_tpu,
    "token_logprobs": logprobs_tpu.token_logprobs_mosaic_tpu,
}
GPU = {
    "sink_attention": pallas_gpu.sink_attention_mosaic_gpu,
    "decode_attention": decode_gpu.decode_attention_mosaic_gpu,
    "grouped_matmul": matmul_gpu.grouped_matmul_mosaic_gpu,
    "grouped_swiglu": matmul_gpu.grouped_swiglu_mosaic_gpu,
    "grouped_matmul_low_rank": matmul_gpu.grouped_matmul_low_rank_mosaic_gpu,
    "grouped_swiglu_low_rank": matmul_gpu.grouped_swiglu_low_rank_mosaic_gpu,
    "token_logprobs": logprobs_gpu.token_logprobs_mosaic_gpu,
}


def tpu(op, case):
    """As `op.call(case, "mosaic_tpu")`."""
    return _call(TPU, op, case)


def gpu(op, case):
    """As `op.call(case, "mosaic_gpu")`."""
    return _call(GPU, op, case)


def _call(kernels, op, case):
    name = next(name for name, known in OPS.items() if known is op)
    run = kernels[name.removesuffix("_mxfp4")]
    more = (ALPHA, LIMIT) if "swiglu" in name else ()

    def attend(q, k, v, sink, *places):
        return run(q, k, v, sink, Layout(*places), case.window, q.shape[3] ** -0.5, interpret=True)

    def product(lhs, rhs, bias, sizes):
        if name.endswith("_mxfp4"):
            rhs, bias = bias, rhs
        return run(lhs, rhs, sizes, bias, *more, interpret=True)

    def adapted(lhs, a, b, sizes, rhs, bias):
        return run(lhs, rhs, sizes, bias, a, b, 2.0, *more, interpret=True)

    def logprobs(hidden, head, targets):
        temperature = jnp.float32(case.temperature)
        return run(hidden, head, targets, temperature, case.vocab_size, interpret=True)

    if "attention" in name:
        return attend
    if name.endswith("low_rank"):
        return adapted
    return logprobs if name == "token_logprobs" else product
