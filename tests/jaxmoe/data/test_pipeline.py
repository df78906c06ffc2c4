# SPDX-License-Identifier: Apache-2.0
"""The stream is shuffled, endless, cut without overlap, and resumes at the exact element."""

import json

import pytest

from jaxmoe.data.files import FileSource
from jaxmoe.data.pipeline import make_prompt, stream_prompts
from jaxmoe.data.rows import Row
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import ByteTokenizer

SOURCE = FileSource(tuple(Row(f"q{i}", str(i)) for i in range(12)))
SETTINGS = {
    "template": Template("{question}="),
    "prompts_per_step": 4,
    "max_prompt_tokens": 9,
    "seed": 5,
}


def _make_stream(source=SOURCE, **changes):
    return stream_prompts(source, ByteTokenizer(), **(SETTINGS | changes))


def _read_ids(stream, steps):
    return [[prompt.id for prompt in next(stream)] for _ in range(steps)]


def test_prompts_have_row_text_tokens_and_answer():
    for prompt in next(_make_stream()):
        assert prompt.text == f"q{prompt.id}="
        assert prompt.tokens == tuple(prompt.text.encode())
        assert prompt.answer == str(prompt.id)


def test_epochs_cover_every_row_once_in_new_order():
    epochs = [sum(_read_ids(stream, 3), []) for stream in [_make_stream()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(12))


def test_unshuffled_epochs_have_the_sources_order():
    stream = _make_stream(shuffle=False)
    assert sum(_read_ids(stream, 6), []) == [*range(12), *range(12)]


def test_the_epoch_counts_passes_and_resumes():
    stream, resumed = _make_stream(), _make_stream()
    assert stream.epoch == 0.0
    _read_ids(stream, 4)
    resumed.set_state(stream.get_state())
    assert stream.epoch == resumed.epoch == 4 / 3


@pytest.mark.parametrize("per_step", [1, 5, 15])
def test_an_epoch_may_have_fractional_steps(per_step):
    flat = sum(_read_ids(_make_stream(prompts_per_step=per_step), 60 // per_step), [])
    assert all(sorted(flat[i : i + 12]) == list(range(12)) for i in range(0, 60, 12))


def test_the_seed_decides_the_order():
    assert (
        _read_ids(_make_stream(), 3)
        == _read_ids(_make_stream(), 3)
        != _read_ids(_make_stream(seed=6), 3)
    )


@pytest.mark.parametrize("before", [0, 1, 2, 3, 7])
def test_a_restored_stream_resumes_at_the_exact_element(before):
    expected = _read_ids(_make_stream(prompts_per_step=5), before + 6)
    first = _make_stream(prompts_per_step=5)
    _read_ids(first, before)
    state = json.loads(json.dumps(first.get_state()))
    second = _make_stream(prompts_per_step=5)
    _read_ids(second, 2)
    second.set_state(state)
    assert _read_ids(second, 6) == expected[before:]
    first.set_state(state)
    assert _read_ids(first, 6) == expected[before:]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 6}, "seed was 5 and is now 6"), ({"prompts_per_step": 6}, "4 and is now 6")],
)
def test_the_state_of_another_stream_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        _make_stream(**change).set_state(_make_stream().get_state())


def test_a_long_prompt_names_its_row_and_option():
    stream = _make_stream(FileSource((Row("short", "1"), Row("é" * 5, "1"))), prompts_per_step=2)
    with pytest.raises(ValueError, match=r"\(9\) tokens; row 1 has 11.*max_prompt_tokens=11"):
        next(stream)


@pytest.mark.parametrize("template", ["", "{q}", "{question}{question}"])
def test_a_template_must_hold_the_question_once(template):
    with pytest.raises(ValueError, match=r"data\.template must hold \{question\} exactly once"):
        Template(template)


def test_a_step_without_prompts_is_refused():
    with pytest.raises(ValueError, match="prompts_per_step must be positive, got 0"):
        _make_stream(prompts_per_step=0)


def test_template_specials_are_ids_and_question_specials_text():
    source = FileSource((Row("<|end|>{question}", "1"),))
    prompt = make_prompt(source, 0, ByteTokenizer(), Template("<|start|>{question}<|end|>"), 99)
    assert prompt.tokens == (261, *b"<|end|>{question}", 262)
