# SPDX-License-Identifier: Apache-2.0
"""What travels, read from programs that XLA compiled, against bytes counted by hand."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmoe.plan.collectives import Collective, count_collectives, sent_bytes

ROWS, WIDTH = 10, 12  # of one device
PIECE = 4 * ROWS * WIDTH  # bytes


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=auto, devices=jax.devices()[:8])


def text_of(mesh, local):
    cut = P(("a", "b"))
    fn = jax.shard_map(local, mesh=mesh, in_specs=(cut, P()), out_specs=cut, check_vma=False)
    x = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    return jax.jit(fn).lower(x, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()


def nested(x, n):
    """Known loops, 3 within 5; and one of n turns with another in it."""

    def inner(x, _):
        return lax.psum(x, "b") * 0.1, None

    def outer(x, _):
        x, _ = lax.scan(inner, x, None, length=3)
        wide = lax.all_gather(x, "a", tiled=True)
        return x + lax.psum_scatter(wide * 0.1, "a", tiled=True), None

    def rounds(_, x):
        left_value = lax.fori_loop(0, n, lambda _, x: lax.all_gather(x, "b")[0], x)
        return lax.ppermute(left_value, "a", [(0, 1), (1, 0)])

    x, _ = lax.scan(outer, x, None, length=5)
    return lax.fori_loop(0, n, rounds, x)


def by_kind(counted):
    kinds = {}
    for collective, times in counted.items():
        kinds.setdefault(collective.kind, []).append(
            (collective.operand, len(collective.groups[0]), times)
        )
    return kinds


def test_loops_multiply_and_bytes_are_of_a_ring(mesh):
    text = text_of(mesh, nested)
    counts, counts_of_seven = count_collectives(text, 8), count_collectives(text, 8, unknown=7)
    trip_counts = {
        "all-reduce": [(PIECE, 4, 15)],
        "all-gather": [(PIECE, 2, 5)],
        "reduce-scatter": [(2 * PIECE, 2, 5)],
    }
    assert {k: v for k, v in by_kind(+counts).items() if k in trip_counts} == trip_counts
    ring = 15 * 2 * 3 / 4 * PIECE + 5 * PIECE + 5 * 2 * PIECE / 2
    assert sent_bytes(counts) == ring
    assert (
        sent_bytes(counts_of_seven) == ring + 7 * PIECE
    )  # the permutation; what is within does not turn
    assert by_kind(+counts_of_seven)["collective-permute"] == [(PIECE, 2, 7)]


def test_a_missing_trip_count_is_read_from_conditions(mesh):
    text = text_of(mesh, nested)  # as libtpu writes it
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"":0', text)
    assert bare != text and count_collectives(bare, 8, 7) == count_collectives(text, 8, 7)


def test_constants_of_a_compound_condition_do_not_count():
    text = """
%goes_on (c: (s32[], f32[3])) -> pred[] {
  %c = (s32[], f32[3]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %five = s32[] constant(5)
  %below = pred[] compare(%i, %five), direction=LT
  %alive = pred[] custom-call(%c), custom_call_target="alive"
  ROOT %both = pred[] and(%below, %alive)
}

%body (d: (s32[], f32[3])) -> (s32[], f32[3]) {
  %d = (s32[], f32[3]{0}) parameter(0)
  %x = f32[3]{0} get-tuple-element(%d), index=1
  ROOT %y = f32[3]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %x = (s32[], f32[3]{0}) parameter(0)
  ROOT %y = (s32[], f32[3]{0}) while(%x), condition=%goes_on, body=%body
}"""
    assert [sent_bytes(count_collectives(text, 2, turns)) for turns in (0, 1)] == [0.0, 12.0]


def test_an_all_to_all_keeps_its_own_part(mesh):
    swap = partial(lax.all_to_all, axis_name="a", split_axis=0, concat_axis=0, tiled=True)
    (collective,) = count_collectives(text_of(mesh, lambda x, _: swap(x)), 8)
    assert (collective.kind, collective.operand, collective.sent_bytes) == (
        "all-to-all",
        PIECE,
        PIECE / 2,
    )
    assert set(map(frozenset, collective.groups)) == {frozenset({i, i + 4}) for i in range(4)}


def test_a_branch_counts_its_larger_side(mesh):
    def either(x, n):
        return lax.cond(n > 3, lambda x: lax.psum(x, ("a", "b")), lambda x: lax.psum(x, "a"), x)

    assert sent_bytes(count_collectives(text_of(mesh, either), 8)) == 2 * 7 / 8 * PIECE


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'a'}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
    ],
)
def test_groups_are_read_in_every_form(written, groups):
    text = f"""
ENTRY %main (x: f32[3]) -> f32[6] {{
  %x = f32[3]{{0}} parameter(0)
  ROOT %y = f32[6]{{0}} all-gather(%x), channel_id=1, {written}, dimensions={{0}}
}}"""
    (collective,) = count_collectives(text, 4)
    assert collective.groups == groups and collective.operand == 12
    unheard = text.replace(written, "replica_groups=@sigil")
    with pytest.raises(ValueError, match="known form; got replica_groups=@sigil"):
        count_collectives(unheard, 4)


def test_hosts_share_what_leaves_them():
    host_of = [i // 4 for i in range(8)]
    everybody, inside = (tuple(range(8)),), ((0, 1, 2, 3), (4, 5, 6, 7))
    gather = Collective("all-gather", 10.0, everybody)
    # a host's 4 devices receive the 4 pieces of the other host together
    assert (gather.sent_bytes, gather.to_other_hosts(host_of)) == (70.0, 10.0)
    assert Collective("all-gather", 10.0, inside).to_other_hosts(host_of) == 0.0
    swap = Collective("all-to-all", 80.0, everybody)
    assert (swap.sent_bytes, swap.to_other_hosts(host_of)) == (70.0, 40.0)  # half of the devices
