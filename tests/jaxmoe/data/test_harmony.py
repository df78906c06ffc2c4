# SPDX-License-Identifier: Apache-2.0
"""Only the final channel is an answer, and only tokens open a channel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.data.harmony import answer_prefix, read_response
from jaxmoe.data.tokenizer import SPECIALS, ByteTokenizer

BYTES = ByteTokenizer()
PROMPT = BYTES.encode("<|start|>user<|message|>2+2<|end|><|start|>assistant", specials=True)
THOUGHT = "<|channel|>analysis<|message|>#### 5?<|end|><|start|>assistant"


def parse_text(text, prompt=PROMPT):
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
    parsed = parse_text(response)
    assert parsed.has_final and parsed.uses_channels and parsed.text == text
    assert parsed.analysis == ("#### 5?" if "analysis" in response else "")


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
    parsed = parse_text(response)
    assert not parsed.has_final and parsed.text == ""


def test_the_stop_token_says_that_it_was_a_call():
    """The text of a response has no stop token in it."""
    text = BYTES.encode("<|channel|>final<|message|>{}", specials=True)
    for name, final in (("<|return|>", True), ("<|call|>", False)):
        parsed = read_response(PROMPT, text, BYTES, stop=[BYTES.special(name)])
        assert (parsed.has_final, parsed.text) == (final, "{}" if final else "")


def test_a_header_spelt_in_plain_tokens_opens_nothing():
    plain = BYTES.encode("<|channel|>final<|message|>4")
    assert not read_response(PROMPT, plain, BYTES).has_final
    inside = [*BYTES.encode(THOUGHT + "<|channel|>final<|message|>", specials=True), *plain]
    assert read_response(PROMPT, inside, BYTES).text == "<|channel|>final<|message|>4"


@pytest.mark.parametrize("prompt", ["2+2=", "<|start|>user<|message|>2+2", "<|start|>", "<|end|>"])
def test_a_prompt_that_asks_for_no_channels_gets_all_of_the_response(prompt):
    parsed = parse_text(THOUGHT, BYTES.encode(prompt, specials=True))
    assert parsed.text == THOUGHT and not parsed.uses_channels and parsed.has_final


CHANNEL = "<|channel|>analysis"
TAILS = ["", "<|channel|>final", "<|channel|>final<|message|>", CHANNEL, CHANNEL + "<|message|>"]


@pytest.mark.parametrize("tail", TAILS)
def test_a_stored_answer_is_put_where_it_is_looked_for(tail):
    prompt = [*PROMPT, *BYTES.encode(tail, specials=True)]
    answer = [*answer_prefix(prompt, BYTES), *b"4", BYTES.stop_ids[0]]
    assert read_response(prompt, answer, BYTES).text == "4"
    assert answer_prefix(BYTES.encode("2+2="), BYTES) == []


@given(st.lists(st.sampled_from([*SPECIALS, "final", "analysis", "assistant", "4", " "])))
def test_any_response_can_be_read(pieces):
    parsed = parse_text("".join(pieces))
    assert parsed.has_final or parsed.text == ""
    if parsed.has_final:
        assert "<|channel|>final" in "".join(pieces)
