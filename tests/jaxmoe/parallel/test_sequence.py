# SPDX-License-Identifier: Apache-2.0
"""Attention over several devices is attention on one: values and every gradient, in any layout."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.model.ops import checkpoint_keeping_attention, no_remat
from jaxmoe.parallel import halo, ring, ulysses
from jaxmoe.parallel.sequence import unzigzag, zigzag
from pallas_kernels.sink_attention import cases, sink_attention
from tests.jaxmoe.parallel.attention_on_devices import run_on_devices
from tests.pallas_kernels.sink_attention.attention_oracle import (
    compare,
    cotangents,
    formula,
    naive,
    values_and_gradients,
)

PLACES = "q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS"
CASE = cases.AttentionCase("packed", 3, 48, 48, 24, 2, 10, 0, "packed", "big")
CASES = (  # what follows compiles nothing more
    CASE,
    CASE._replace(name="left", layout="left", sinks="normal"),
    CASE._replace(name="right", layout="right", sinks="none"),
    CASE._replace(name="causal", layout="causal", sinks="big"),
)


compiled = functools.cache(run_on_devices)


@functools.cache
def expected_values(case):
    inputs, ct = cases.init_attention_inputs(case), cotangents(case)
    return inputs, ct, formula(case, *ct, *inputs), naive(case, jnp.float32, *ct, *inputs)


def check_case(attend_fn, case):
    inputs, ct, exact, simple = expected_values(case)
    actual = values_and_gradients(attend_fn, case.window, *ct, *inputs)
    compare(case, actual, inputs, ct, simple, exact)


QUICK = (  # windows: none, within the next shard, over three
    ("ring", 4, 0, 2),
    ("zigzag", 4, 9, 2),
    ("ulysses", 8, 0, 2),
    ("halo", 4, 30, 2),
)


@pytest.mark.slow
@pytest.mark.parametrize("method, shards, window, K", QUICK)
def test_several_devices_give_what_one_gives(method, shards, window, K):
    for case in CASES:
        check_case(compiled(method, shards), case._replace(window=window, K=K))


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("method, window", [("ring", 0), ("ulysses", 9), ("halo", 30)])
def test_half_precision_is_as_good_as_one_devices(method, window):
    for case in CASES:
        case = case._replace(window=window)
        inputs, ct = cases.init_attention_inputs(case, jnp.bfloat16), cotangents(case, jnp.bfloat16)
        actual = values_and_gradients(compiled(method, 4), window, *ct, *inputs)
        compare(case, actual, inputs, ct)


def test_rows_and_heads_may_be_cut_too():
    """Each device its own rows and heads, as with a batch and tensor parallelism."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "sequence", "tensor"))
    heads, tokens = P("data", "sequence", "tensor"), P("data", "sequence")

    def attend_fn(window, *arrays):
        def run_shard(q, k, v, sink, *places):
            layout = dict(zip(PLACES, places, strict=True))
            pairs = zip(
                ring.ring_attention(q, k, v, sink, **layout),
                ulysses.ulysses_attention(q, k, v, sink, **layout),
                strict=True,
            )
            return tuple((a + b) / 2 for a, b in pairs)

        ins = heads, heads, heads, P("tensor"), *[tokens] * 4
        run = jax.shard_map(
            run_shard, mesh=mesh, in_specs=ins, out_specs=(heads, heads), check_vma=False
        )
        return run(*arrays)

    check_case(attend_fn, CASE._replace(B=4))


def test_visitors_that_nobody_sees_are_not_read():
    """NaN passes through a mask, in p·v and in dO·v: only what is skipped keeps it out."""
    inputs, ct, *_ = expected_values(CASES[-1])
    is_late = np.arange(CASE.T) >= CASE.T * 3 // 4
    bad = jnp.where(is_late[None, :, None, None], jnp.nan, inputs.v_BSKH)
    o, _, dq, *_ = values_and_gradients(compiled("ring", 4), 0, *ct, *inputs._replace(v_BSKH=bad))
    for x in (o, dq):
        np.testing.assert_array_equal(np.isfinite(x).all((0, 2, 3)), ~is_late)


def sink_in_every_part(patch):
    def with_its_sink(q, k, v, sink, layout, options):
        return ring.sink_attention(q, k, v, sink, **options.kernel_kwargs(layout))

    patch.setattr(ring, "attend_part", with_its_sink)


def a_visitor_unread(patch):
    def not_the_second(layout, window):
        is_diagonal = layout.k_positions_BS[:, 0] == layout.q_positions_BT[:, 0]
        return is_diagonal.all()

    patch.setattr(ring, "is_anything_visible", not_the_second)


def gradients_left_behind(patch):
    sent_on = ring._send_to_next

    def visitors_only(x, axis):
        return sent_on(x, axis) if isinstance(x, ring._VisitingKeys) else x

    patch.setattr(ring, "_send_to_next", visitors_only)


def one_neighbour_less(patch):
    borrowed = halo.halo_sizes
    patch.setattr(halo, "halo_sizes", lambda *args: borrowed(*args)[:-1])


def sinks_of_the_first_device(patch):
    patch.setattr(ulysses.lax, "axis_index", lambda _: jnp.int32(0))


FAULTS = (
    ("ring", sink_in_every_part),
    ("ring", a_visitor_unread),
    ("ring", gradients_left_behind),
    ("halo", one_neighbour_less),
    ("ulysses", sinks_of_the_first_device),
)


@pytest.mark.parametrize("method, fault", FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_is_seen(method, fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="error"):
        check_case(
            run_on_devices(method, 2),
            CASE._replace(layout="causal", window=30 if method == "halo" else 0),
        )


def test_a_zigzag_pairs_early_and_late_chunks_reversibly():
    rows = jnp.asarray(np.arange(24).reshape(2, 12))
    hidden = jnp.asarray(np.arange(48).reshape(2, 12, 2))
    to_zigzag, from_zigzag = (jax.jit(f, static_argnums=1) for f in (zigzag, unzigzag))
    assert to_zigzag(rows, 3)[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    for x in (rows, hidden):
        np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 3), 3), x)
    np.testing.assert_array_equal(to_zigzag(hidden, 3)[..., 0], to_zigzag(rows, 3) * 2)


def test_a_window_fetches_only_the_tokens_it_covers():
    assert halo.halo_sizes(1, 12, 4) == []
    assert halo.halo_sizes(9, 12, 4) == [8]
    assert halo.halo_sizes(13, 12, 4) == [12]
    assert halo.halo_sizes(30, 12, 4) == [12, 12, 5]
    assert halo.halo_sizes(128, 12, 4) == [12, 12, 12]


def test_lengths_that_do_not_divide_are_one_line():
    inputs = jax.eval_shape(lambda: cases.init_attention_inputs(CASE._replace(N=6)))

    def trace_method(method, shards):
        jax.eval_shape(functools.partial(run_on_devices(method, shards), 0), *inputs)

    with pytest.raises(
        ValueError, match=r"tokens of a row \(48\).*2 \* 16 devices.*Pad rows to 64"
    ):
        zigzag(jnp.zeros((2, 48)), 16)
    with pytest.raises(
        ValueError, match=r"query heads \(6\).*4 devices of sequence.*mesh.attention=ring"
    ):
        trace_method("ulysses", 4)
    with pytest.raises(
        ValueError, match="halo_attention needs a window, got None. Use ring_attention"
    ):
        layout = dict(zip(PLACES, inputs[4:], strict=True))
        inspect.unwrap(halo.halo_attention)(*inputs[:4], **layout, window=None)


def count_permutes(remat):
    """Sends in the program of a gradient through a ring, by `remat`."""
    inputs = cases.init_attention_inputs(CASE)

    def sum_output(q, *arrays):
        return jnp.sum(jnp.sin(compiled("ring", 2)(0, jnp.sin(q), *arrays)[0]))

    step = jax.value_and_grad(remat(sum_output), argnums=(0, 1, 2, 3))
    return jax.jit(step).lower(*inputs).compile().as_text().count(" collective-permute(")


def test_a_saved_ring_is_not_repeated():
    saved, plain, recomputed = map(
        count_permutes, (checkpoint_keeping_attention, no_remat, jax.checkpoint)
    )
    assert 0 < saved == plain < recomputed


def saved_bytes(attend_fn, devices):
    """Temporary bytes of a device in a forward and backward pass over 16,384 tokens."""
    case = cases.AttentionCase("long", 1, 16_384, 16_384, 8, 2, 16)
    inputs = jax.eval_shape(lambda: cases.init_attention_inputs(case))
    ct = jax.eval_shape(lambda: cotangents(case))
    cut = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("sequence",)), P(None, "sequence"))
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut if x.ndim > 1 else None)
        for x in (*ct, *inputs)
    ]
    step = values_and_gradients.lower(attend_fn, 0, *args).compile()
    return step.memory_analysis().temp_size_in_bytes


def test_a_device_of_a_ring_holds_its_share():
    def without_merge(_, q, k, v, sink, *places):
        return sink_attention(q, k, v, sink, **dict(zip(PLACES, places, strict=True)))

    assert saved_bytes(run_on_devices("ring", 8), 8) < 0.25 * saved_bytes(without_merge, 1)
