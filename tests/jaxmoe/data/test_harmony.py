# SPDX-License-Identifier: Apache-2.0
"""Only the final channel is an answer, and only tokens open a channel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.data.harmony import answer_opening, read_response
from jaxmoe.data.tokenizer import SPECIALS, ByteTokenizer

BYTES = ByteTokenizer()
ASKED = BYTES.encode("<|start|>user<|message|>2+2<|end|><|start|>assistant", specials=True)
THOUGHT = "<|channel|>analysis<|message|>#### 5?<|end|><|start|>assistant"


def said(text, prompt=ASKED):
    return read_response(prompt, BYTES.encode(text, specials=True), BYTES)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (THOUGHT + "<|channel|>final<|message|>4<|return|>", "4"),
        (THOUGHT + "<|channel|>final<|message|>4", "4"),  # cut short
        ("<|channel|>final<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>4", "4"),
        ("<|channel|>final<|constrain|>json<|message|>{}<|return|>", "{}"),
        ("<|channel|>final<|message|><|return|>", ""),
    ],
)
def test_the_last_final_message_is_the_answer(response, text):
    found = said(response)
    assert found.final and found.channels and found.text == text
    assert found.analysis == ("#### 5?" if "analysis" in response else "")


@pytest.mark.parametrize(
    "response",
    [
        "", "4", THOUGHT, "<|channel|>analysis<|message|>#### 4<|return|>",
        "<|channel|>final", "<|message|>4<|return|>",
        "<|channel|>final to=python<|message|>4<|call|>",
        "<|channel|>finally<|message|>4", "<|channel|>analysis<|channel|>final<|message|>4",
        THOUGHT.replace("assistant", "user") + "<|channel|>final<|message|>4",
        "<|end|><|channel|>final<|message|>4<|return|>",
        "<|channel|>commentary<|message|>4<|return|>",
        # calls that the model put on the final channel
        "<|channel|>final <|constrain|>functions.add<|message|>{}<|call|>",
        "<|channel|>final <|constrain|>functions.add<|message|>{}",
        "<|channel|>final<|constrain|>json to=functions.add<|message|>{}",
        "<|channel|>final <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>final<|message|>4<|call|>",
        " to=functions.add<|channel|>final<|message|>4",
        "<|channel|>final to=functions.add json<|message|>4",
    ],
)  # fmt: skip
def test_without_a_final_channel_there_is_no_answer(response):
    found = said(response)
    assert not found.final and found.text == ""


def test_the_stop_token_says_that_it_was_a_call():
    """The text of a response has no stop token in it."""
    text = BYTES.encode("<|channel|>final<|message|>{}", specials=True)
    for name, final in (("<|return|>", True), ("<|call|>", False)):
        found = read_response(ASKED, text, BYTES, stop=[BYTES.special(name)])
        assert (found.final, found.text) == (final, "{}" if final else "")


def test_a_header_spelt_in_plain_tokens_opens_nothing():
    plain = BYTES.encode("<|channel|>final<|message|>4")
    assert not read_response(ASKED, plain, BYTES).final
    inside = [*BYTES.encode(THOUGHT + "<|channel|>final<|message|>", specials=True), *plain]
    assert read_response(ASKED, inside, BYTES).text == "<|channel|>final<|message|>4"


@pytest.mark.parametrize("prompt", ["2+2=", "<|start|>user<|message|>2+2", "<|start|>", "<|end|>"])
def test_a_prompt_that_asks_for_no_channels_gets_all_of_the_response(prompt):
    found = said(THOUGHT, BYTES.encode(prompt, specials=True))
    assert found.text == THOUGHT and not found.channels and found.final


CHANNEL = "<|channel|>analysis"
TAILS = ["", "<|channel|>final", "<|channel|>final<|message|>", CHANNEL, CHANNEL + "<|message|>"]


@pytest.mark.parametrize("tail", TAILS)
def test_a_stored_answer_is_put_where_it_is_looked_for(tail):
    prompt = [*ASKED, *BYTES.encode(tail, specials=True)]
    answer = [*answer_opening(prompt, BYTES), *b"4", BYTES.stop_ids[0]]
    assert read_response(prompt, answer, BYTES).text == "4"
    assert answer_opening(BYTES.encode("2+2="), BYTES) == []


@given(st.lists(st.sampled_from([*SPECIALS, "final", "analysis", "assistant", "4", " "])))
def test_any_response_can_be_read(pieces):
    found = said("".join(pieces))
    assert found.final or found.text == ""
    if found.final:
        assert "<|channel|>final" in "".join(pieces)
