# SPDX-License-Identifier: Apache-2.0
"""Faults planted in every implementation, each of which the comparison with the oracle must see.

A fault that changed nothing would mean that the part it is planted in is not used, or not tested.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import blocks, masks
from pallas_kernels.sink_attention import cases, common, gradients
from pallas_kernels.sink_attention.triton_kernels import triton_launch
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.sink_attention import attention_sides

# One row of the batch has padding, segments are longer than the window, both exceed a block.
LAYOUT = "packed"


def inputs_of(side):
    case = side.case._replace(T=side.case.S, layout=LAYOUT)
    return case, cases.init_attention_inputs(case, side.dtype), oracle.cotangents(case, side.dtype)


def with_window(change):
    """The predicate, and the bounds of blocks by the same rule, of another window."""

    def plant(side, patch):
        if side.predicate is None:  # Triton's kernels have a predicate of their own
            original = triton_launch.kernel_constants

            def constants(K, G, H, window, scale, tiles):
                return original(K, G, H, window + change, scale, tiles)

            patch.setattr(triton_launch, "kernel_constants", constants)
        else:
            name = "is_visible" if hasattr(side.predicate, "is_visible") else "is_in_window"
            original = getattr(masks, name)

            def changed(q_pos, k_pos, window, *segments):
                return original(q_pos, k_pos, window + change, *segments)

            patch.setattr(side.predicate, name, changed)
        if side.blocks is not None:

            def block_table(*args):
                return blocks.block_table(*args[:-1], args[-1] + change)

            patch.setattr(side.blocks, "block_table", block_table)

    return plant


def with_tables(change):
    """Other tables of the blocks that are needed and of those seen whole."""

    def plant(side, patch):
        patch.setattr(side.blocks, "block_table", lambda *args: change(*blocks.block_table(*args)))

    return plant


def forget_the_last_block(needed, full):
    last = jnp.cumsum(needed, 2) == jnp.sum(needed, 2, keepdims=True)
    return needed & ~last, full & ~last


def mask_no_block(needed, full):
    return needed, needed


def changed_sums(change):
    def plant(side, patch):
        def backward_sums(*args):
            return change(common.backward_sums, *args)

        patch.setattr(gradients, "backward_sums", backward_sums)

    return plant


def no_gradient_to_the_sink(original, *args):
    lse, delta, dsink = original(*args)
    return lse, delta, jnp.zeros_like(dsink)


def weights_without_the_sink(original, o, lse, sink, dout, dlse):
    """The mistake of kernels that know no sinks: p = e^{z − lse} of the keys alone."""
    finite_lse, delta, dsink = original(o, lse, sink, dout, dlse)
    keys_alone = lse + jnp.log1p(-jnp.minimum(jnp.exp(sink[None, None] - lse), 1 - 1e-6))
    return jnp.where(jnp.isfinite(keys_alone), keys_alone, finite_lse), delta, dsink


def no_cotangent_of_lse(original, o, lse, sink, dout, dlse):
    return original(o, lse, sink, dout, jnp.zeros_like(dlse))


def scores_reach_what_is_not_seen(side, patch):
    """−1,000 is below any score that normal inputs have, and not below all that there are."""
    for module, name in side.unseen:
        patch.setattr(module, name, type(getattr(module, name))(-1e3))


BORDER = "blocks at the border taken as seen whole"
FAULTS = {
    "a window of one key more": with_window(1),
    "a window of one key less": with_window(-1),
    "the last block forgotten": with_tables(forget_the_last_block),
    BORDER: with_tables(mask_no_block),
    "no gradient to the sink": changed_sums(no_gradient_to_the_sink),
    "a backward whose weights leave the sink out": changed_sums(weights_without_the_sink),
    "the cotangent of lse dropped": changed_sums(no_cotangent_of_lse),
    "what is not seen scored -1000": scores_reach_what_is_not_seen,
}
QUICK = "none", "a window of one key more", "no gradient to the sink"
SIDES = ("xla", "mosaic_tpu", "mosaic_gpu", "triton")
NOT_TRIED = {
    ("xla", BORDER),  # it masks all of them
    ("triton", BORDER),  # what is not masked is read past the end of the arrays too
}


def fault_param(side, fault):
    """A compilation each, and with an interpreter a slow one: by default a few of XLA alone."""
    marks = () if side == "xla" and fault in QUICK else pytest.mark.slow
    return pytest.param(side, fault, marks=marks, id=f"{side}-{fault.replace(' ', '-')}")


@pytest.fixture(scope="module")
def side(request):
    with attention_sides.opened(request.param) as opened:
        yield opened


def compare(side):
    """Compiles anew: what was compiled without the fault must not be found."""
    case, inputs, ct = inputs_of(side)
    jax.clear_caches()
    fresh = side._replace(attend=lambda *args: side.attend(*args))
    oracle.compare(case, fresh.run(*ct, *inputs), inputs, ct)
    low = attention_sides.far_below(inputs)
    oracle.compare(case, fresh.run(*ct, *low), low, ct, exponent=attention_sides.LARGE_SCORE)


@pytest.mark.parametrize(
    "side, fault",
    [fault_param(x, y) for x in SIDES for y in ("none", *FAULTS) if (x, y) not in NOT_TRIED],
    indirect=["side"],
)
def test_planted_faults_are_seen(side, fault):
    if fault == "none":
        compare(side)
        return
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](side, patch)
        with pytest.raises(AssertionError, match="error"):
            compare(side)
