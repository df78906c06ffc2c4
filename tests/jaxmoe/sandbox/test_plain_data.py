# SPDX-License-Identifier: Apache-2.0
"""The trainer checks forms of values without making the values: what it takes can be decoded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.sandbox.inside.plain_data import (
    MAX_DEPTH,
    NotPlainData,
    check_form,
    decode_value,
    encode_value,
)

KINDS = st.sampled_from(
    ["int", "float", "complex", "bytes", "dict", "list", "tuple", "set", "frozenset", "other"]
)
LEAVES = st.none() | st.booleans() | st.sampled_from(["0x4", "4", "nan", "", "é", "0a"])
FORMS = st.recursive(
    LEAVES,
    lambda forms: (
        st.dictionaries(KINDS, st.lists(forms, max_size=3) | LEAVES, max_size=2)
        | st.builds(lambda x: {"dict": x}, st.lists(st.tuples(forms, forms).map(list), max_size=2))
        | st.lists(forms, max_size=2)
    ),
    max_leaves=8,
)


def accepts(read, form):
    try:
        read(form)
    except NotPlainData:
        return False
    return True


@given(FORMS)
def test_a_form_is_taken_if_it_can_be_decoded_and_else_refused(form):
    assert accepts(check_form, form) == accepts(decode_value, form)


@pytest.mark.parametrize(
    "form",
    [
        {"set": [{"list": []}]},
        {"set": [{"tuple": [{"set": []}]}]},
        {"dict": [[{"dict": []}, 1]]},
        {"dict": [[None]]},
        {"set": {}},
        {"frozenset": [{"frozenset": [{"list": []}]}]},
    ],
)
def test_what_cannot_be_hashed_is_no_key(form):
    assert not accepts(check_form, form) and not accepts(decode_value, form)


def test_a_form_is_passed_on_as_it_came_and_not_too_deep():
    value = {(1, frozenset({2})): [{"a": {3.5}}, (b"x", None, True)]}
    form = check_form(encode_value(value))
    assert form.decode() == value and encode_value([form]) == {"list": [form.form]}
    deep = form.form
    for _ in range(MAX_DEPTH + 1):
        deep = {"tuple": [deep]}
    assert not accepts(check_form, deep) and not accepts(decode_value, deep)
