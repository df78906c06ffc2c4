# SPDX-License-Identifier: Apache-2.0
"""Kernels for chips on a CPU, by Pallas' interpreter, under their names in the public functions."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pallas_kernels.decode_attention import api as decoding
from pallas_kernels.grouped_matmul import api as matmul
from pallas_kernels.sink_attention import api as attention
from pallas_kernels.token_logprobs import api as logprobs

TABLES = (
    attention.IMPLS,
    decoding.IMPLS,
    matmul.IMPLS,
    matmul.SWIGLU_IMPLS,
    logprobs.IMPLS,
)
OLD = jax.__version_info__ < (0, 11)
TPU = "mosaic_tpu_invariant"
GPU = pytest.param(
    "mosaic_gpu_invariant",
    marks=[pytest.mark.slow, pytest.mark.skipif(OLD, reason="jax 0.10 interprets a block in 10 s")],
)
INVARIANT = (TPU, GPU)


def multiply_in_order(a_mk: np.ndarray, b_kn: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The product of two matrices, whose sums all have one order, as a tensor core's do.

    The interpreter of Hopper's kernels calls np.matmul, and on some CPUs OpenBLAS adds the last
    rows of a matrix in another order than the first.
    """
    product_mn = np.zeros((a_mk.shape[0], b_kn.shape[1]), dtype)
    for a_m, b_n in zip(a_mk.astype(dtype).T, b_kn.astype(dtype), strict=True):
        product_mn += a_m[:, None] * b_n
    return product_mn


@contextlib.contextmanager
def interpreted(*names: str) -> Iterator[pytest.MonkeyPatch]:
    """Let the implementations of these names run on this CPU, in every operation that has them."""
    with pytest.MonkeyPatch.context() as patch:
        if any("mosaic_gpu" in name for name in names):
            from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

            numpy = SimpleNamespace(**vars(np) | dict(matmul=multiply_in_order))
            patch.setattr(gpu_callbacks, "np", numpy)
        for table in TABLES:
            for name in names:
                if name in table:
                    run = partial(table[name].run, interpret=True)
                    on_cpu = replace(
                        table[name], run=run, unsupported=lambda *_: None, platforms=("cpu",)
                    )
                    patch.setitem(table, name, on_cpu)
        yield patch
