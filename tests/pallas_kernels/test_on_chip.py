# SPDX-License-Identifier: Apache-2.0
"""Every kernel on an accelerator against the reference, which interpretation cannot replace.

    XLA_FLAGS=--xla_gpu_autotune_level=0 JAX_PLATFORMS=cuda python -m pytest -m gpu FILE
    JAX_PLATFORMS=tpu python -m pytest -m tpu FILE

FILE is tests/pallas_kernels/test_on_chip.py. XLA would spend minutes on tuning the reference.

Hostile cases whole, real ones (131,072 tokens, 128 experts of 2880 x 5760, MXFP4) in sampled rows,
one of 64: no tile goes unseen (`pallas_kernels/check/sampled.py`). By default the same checks run
through XLA on a few cases, so that they are known to work; `-m slow` has all 131,072 rows of every
operation, and faults planted in one tile of them. When the tests pass on a chip, the kernel's name
goes into `proven` in the api of that operation.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bench.ops import OPS
from pallas_kernels.check import one
from pallas_kernels.decode_attention import cases as decode_cases
from pallas_kernels.grouped_matmul.cases import MatmulCase, zipf_sizes
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase
from tests.pallas_kernels.grouped_matmul import (
    test_grouped_matmul_mosaic_invariant as grouped_invariant,
)
from tests.pallas_kernels.sink_attention import (
    test_sink_attention_mosaic_invariant as attention_invariant,
)
from tests.pallas_kernels.token_logprobs import (
    test_token_logprobs_mosaic_invariant as logprobs_invariant,
)

PLATFORMS = {
    "mosaic_gpu": "gpu",
    "triton": "gpu",
    "mosaic_tpu": "tpu",
    "mosaic_gpu_invariant": "gpu",
    "mosaic_tpu_invariant": "tpu",
}

# Beside the real cases, cut to what the reference can hold: the paths that those do not take.
EXTRA = {
    "sink_attention": [
        *(case._replace(H=64) for case in OPS["sink_attention"].cases.TEST_CASES),
        AttentionCase("head_128_window", 2, 300, 300, 6, 2, 128, 128, "packed"),
        AttentionCase("long_rows_few_heads", 1, 4999, 4999, 2, 1, 64, 0, "packed", "big"),
        AttentionCase("past_a_window", 1, 4999, 4999, 2, 1, 64, 128, "left"),
    ],
    "decode_attention": list(decode_cases.TEST_CASES),
    "grouped_matmul": [
        MatmulCase("uneven", 1331, 256, 384, (1, 290, 170, 0, 530, 240, 70)),
        MatmulCase("rows_past_the_sum", 331, 192, 192, (70, 0, 5, 0, 130)),
        MatmulCase("fewer_rows_than_a_tile", 9, 128, 128, (2, 0, 1, 4, 0, 1, 1)),
        MatmulCase("none", 64, 128, 128, (0, 0, 0)),
    ],
    "token_logprobs": [
        LogprobsCase("padded_head", 300, 128, 1024, 1000, 0.7),
        LogprobsCase("few_tokens", 5, 192, 640, 640),
    ],
}
EXTRA["grouped_swiglu"] = EXTRA["grouped_matmul"]
for name in ("grouped_matmul", "grouped_swiglu"):  # whose halves of rows hold whole scales
    EXTRA[f"{name}_mxfp4"] = [case for case in EXTRA[name] if case.D % 64 == 0]
    EXTRA[f"{name}_rounded"] = EXTRA[f"{name}_mxfp4"]
    EXTRA[f"{name}_low_rank"] = [case._replace(rank=5) for case in EXTRA[f"{name}_mxfp4"]]

T = 131_072
_ROWS = MatmulCase("far", T, 64, 128, zipf_sizes(T, 128))
LARGEST = {  # as many rows as the longest real cases have, in everything else small
    "sink_attention": AttentionCase("far", 1, T, T, 2, 1, 16, 128),
    "decode_attention": AttentionCase("far", 2, 1, T, 6, 2, 16),
    "token_logprobs": LogprobsCase("far", T, 16, 211, 199, 0.7),
} | {name: _ROWS for name in OPS if name.startswith("grouped")}
QUICK = "token_logprobs"  # the others take longer than a default test may


def calls():
    """(operation, case, implementation), each with the mark of its platform."""
    for name, op in OPS.items():
        for case in (*EXTRA[name], *op.cases.REAL_CASES, *op.cases.LONG_CASES):
            for impl, platform in PLATFORMS.items():
                if impl != "triton" or name == "sink_attention":
                    mark = getattr(pytest.mark, platform)
                    yield pytest.param(
                        name, case, impl, id=f"{name}-{case.name}-{impl}", marks=mark
                    )
        case = EXTRA[name][1]
        several = name.startswith("grouped") and name != "grouped_matmul_mxfp4"
        mark = pytest.mark.slow if several else ()  # whose case is the same
        yield pytest.param(name, case, "xla", id=f"{name}-{case.name}-xla", marks=mark)
        yield pytest.param(name, LARGEST[name], "xla", id=f"{name}-far-xla", marks=pytest.mark.slow)


def ready(impl, call, inputs):
    """Skip if the kernel does not support these shapes; fail on another chip than its own."""
    platform = PLATFORMS.get(impl, jax.default_backend())
    assert jax.default_backend() == platform, f"JAX_PLATFORMS must name a {platform}"
    try:
        jax.eval_shape(call, *inputs)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name, case, impl", list(calls()))
def test_values_and_gradients_repeat_ten_times(name, case, impl):
    op, dtype = OPS[name], jnp.float32 if impl == "xla" else jnp.bfloat16
    ready(impl, op.call(case, impl), jax.eval_shape(lambda: op.inputs(case, dtype, 0)))
    try:
        fault = one.find_fault(op, case, impl, dtype, repeats=2 if impl == "xla" else 10)
    except jax.errors.JaxRuntimeError as error:
        if one.is_out_of_memory(error) and case in op.cases.LONG_CASES:
            pytest.skip(f"it needs a device with more memory: {str(error).splitlines()[0]}")
        raise
    assert fault is None


@pytest.mark.parametrize(
    "name, result, double",
    [
        pytest.param(
            name,
            result,
            double,
            id=f"{name}-{double}",
            marks=() if (name, result) == (QUICK, "logp") else pytest.mark.slow,
        )
        for name, op in OPS.items()
        if op.differentiated
        for result, double in (
            (op.results[0], "wrong_in_one_far_tile"),
            (op.results[-op.differentiated], "wrong_gradient_in_one_far_tile"),
            (op.results[1 - op.differentiated], "wrong_gradient_in_one_shared_tile"),
        )
    ],
)
def test_one_wrong_tile_past_row_65536_is_seen(name, result, double):
    impl = f"tests.pallas_kernels.check.doubles:{double}"
    fault = one.find_fault(
        one.replace_implementation(OPS[name], impl), LARGEST[name], impl, jnp.float32, repeats=1
    )
    assert fault is not None and fault.startswith(f"{result}: relative error 3.00e-02")


@pytest.mark.parametrize(
    "impl",
    [
        pytest.param(impl, marks=getattr(pytest.mark, chip))
        for impl, chip in PLATFORMS.items()
        if impl.endswith("invariant")
    ],
)
def test_a_rows_bits_ignore_the_other_rows(impl):
    """Batch invariance on the chip; interpreted in the tests of the operations."""
    for window in attention_invariant.WINDOWS:
        differing, _ = attention_invariant.compositions(
            *attention_invariant.inputs(), impl, window, (1, 140, 299)
        )
        assert not any(differing.values()), (window, differing)
    for fn in grouped_invariant.FUNCTIONS:
        for lora in (False, True):
            differing, _ = grouped_invariant.differing(fn, grouped_invariant.inputs(), impl, lora)
            assert differing == 0, (fn, lora)
    assert logprobs_invariant.differing(logprobs_invariant.inputs(), impl)[0] == 0
