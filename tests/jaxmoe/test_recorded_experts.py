# SPDX-License-Identifier: Apache-2.0
"""A token's recorded experts are ones that a router can have chosen, or counted as unknown."""

import numpy as np
import pytest

from jaxmoe.recorded_experts import mark_unknown_experts
from jaxmoe.records import UNKNOWN_EXPERT

N, LAYERS, ACTIVE, PROMPT, TOKENS = 7, 3, 2, 4, 9


def routed(dtype=np.uint8, active=ACTIVE):
    dice = np.random.default_rng(5)
    chosen = [dice.permutation(N)[:active] for _ in range(TOKENS * LAYERS)]
    return np.array(chosen, dtype).reshape(TOKENS, LAYERS, active)


def check(array, **options):
    return mark_unknown_experts(array, **{"n_experts": N, "prompt_tokens": PROMPT, **options})


def unknown(array, **options):
    """Numbers of the tokens that are not known; the others must be as they were."""
    checked = check(array, **options)
    assert checked.dtype == (np.int8 if options.get("n_experts", N) <= 128 else np.int16)
    lost_T = (checked == UNKNOWN_EXPERT).all(axis=(1, 2))
    np.testing.assert_array_equal(checked[~lost_T], array[~lost_T])
    assert not (checked[~lost_T] == UNKNOWN_EXPERT).any()
    return np.flatnonzero(lost_T).tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
def test_experts_of_a_router_are_unchanged(dtype):
    assert unknown(routed(dtype)) == []


def test_rows_of_zeros_are_unknown():
    array = routed()
    array[2] = 0
    assert unknown(array) == [2]
    assert unknown(np.zeros_like(array)) == list(range(TOKENS))


def test_a_prompt_of_zeros_is_unknown():
    array = routed()
    array[:PROMPT] = 0
    assert unknown(array) == list(range(PROMPT))


def test_an_expert_twice_in_a_layer_is_unknown():
    array = routed()
    array[6, 1] = array[6, 1, 0]
    assert unknown(array) == [6]


@pytest.mark.parametrize(
    ("dtype", "mark"), [(np.int16, -1), (np.int32, -1), (np.uint8, 255), (np.uint16, 65535)]
)
def test_an_engines_mark_is_unknown_also_if_unsigned(dtype, mark):
    array = routed(dtype)
    array[3], array[5, 2] = mark, mark  # a whole token; one layer of another
    assert unknown(array) == [3, 5]


def test_expert_255_of_256_is_an_expert():
    array = routed()
    array[1, 1, 0] = 255
    assert unknown(array, n_experts=256) == []
    array[1, 1, 0] = 127
    assert unknown(array, n_experts=128) == []  # the largest that one byte holds


@pytest.mark.parametrize(("dtype", "value"), [(np.int32, N), (np.int32, -2), (np.uint8, 254)])
def test_a_number_that_is_no_expert_is_refused(dtype, value):
    array = routed(dtype)
    array[4, 0, 1] = value
    with pytest.raises(ValueError, match=rf"from 0 to 6, or -1 if unknown; got {value}"):
        check(array)


def test_an_impossible_run_of_zeros_is_unknown():
    array = routed(active=1)  # three layers of seven experts: 8.4 bits a token, and 16 are a run
    array[1], array[7] = 0, 0
    assert unknown(array) == []
    array[:PROMPT] = 0
    assert unknown(array) == list(range(PROMPT))
    array[6:8] = 0
    assert unknown(array) == [*range(PROMPT), 6, 7]
    assert unknown(array[:, :1]) == []  # 2.8 bits a token
    assert unknown(np.zeros_like(array), n_experts=1) == []  # one expert: always this one


def test_a_single_row_of_many_zeros_is_unknown():
    array = np.repeat(routed(active=1), 2, axis=1)
    array[1:3, 0], array[5] = 0, 0
    assert unknown(array) == [5]


def test_runs_of_zeros_do_not_cross_into_answers():
    array = routed(active=1)
    array[PROMPT - 1 : PROMPT + 1] = 0
    assert unknown(array) == []
