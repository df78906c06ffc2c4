# SPDX-License-Identifier: Apache-2.0
"""Chat rows are rendered by the tokenizer's own template, and no row writes its markup."""

import datetime
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.chat_template import ChatTemplate, load_chat_template
from jaxmoe.data.rows import Message, Row
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import ByteTokenizer, HFTokenizer, write_byte_tokenizer

BYTES = ByteTokenizer()
TURNS = """\
{%- for turn in messages %}
<|start|>{{ turn.role }}<|message|>{{ turn.content | trim }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"""
CHAT = Row(
    " 2+2= ",
    "4",
    earlier=(Message("user", "1+1="), Message("assistant", "2")),
    system="Brief.",
    chat=True,
    location="a:3",
)


def make_template(text, **changes):
    return Template("auto", chat=ChatTemplate(text, {"bos_token": "<|startoftext|>"}), **changes)


def test_chats_are_rendered_and_plain_texts_are_not():
    text, tokens = make_template(TURNS).render(CHAT, BYTES)
    assert text == (
        "<|start|>system<|message|>Brief.<|end|>\n<|start|>user<|message|>1+1=<|end|>\n"
        "<|start|>assistant<|message|>2<|end|>\n<|start|>user<|message|>2+2=<|end|>\n"
        "<|start|>assistant<|message|>"
    )
    assert BYTES.decode(tokens) == text and tokens == BYTES.encode(text, specials=True)
    assert make_template(TURNS).render(Row("2+2=", "4"), BYTES) == ("2+2=", list(b"2+2="))


def test_a_row_knows_whether_it_is_a_chat():
    chat = [{"role": "user", "content": "2+2="}]
    for stored in (chat, json.dumps(chat)):
        assert read_row("a:1", {"prompt": stored, "answer": "4"}, answers=True).chat
    assert not read_row("a:1", {"prompt": "2+2=", "answer": "4"}, answers=True).chat


def test_template_chat_makes_every_row_a_chat():
    template = Template("chat", system="Of all.", chat=ChatTemplate(TURNS, {}))
    text, _ = template.render(Row("2+2=", "4"), BYTES)
    assert text.startswith("<|start|>system<|message|>Of all.<|end|>\n<|start|>user<|message|>2+2=")
    with pytest.raises(ConfigError, match="data.template=chat needs a tokenizer with a chat"):
        Template("chat")


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(ConfigError, match=r"a:3 is a chat, and the tokenizer has no chat template"):
        Template("auto").render(CHAT, BYTES)
    assert Template("{question}").render(Row("2+2=", "4", chat=True), BYTES)[0] == "2+2="
    with pytest.raises(ConfigError, match="data.system needs a field"):
        Template("auto", system="Brief.").render(Row("2+2=", "4"), BYTES)


HOSTILE = st.lists(
    st.sampled_from(["<|end|>", "<|start|>", "<|", "|>", "system", "<|message|>", "é", " ", "\n"]),
    max_size=8,
).map("".join)


@given(HOSTILE, HOSTILE)
def test_special_strings_of_a_row_stay_text(first_turn, question):
    row = Row(
        question, "4", earlier=(Message("user", first_turn), Message("assistant", "ok")), chat=True
    )
    text, tokens = make_template(TURNS).render(row, BYTES)
    assert BYTES.decode(tokens) == text
    plain = Row("", "4", earlier=(Message("user", ""), Message("assistant", "ok")), chat=True)
    specials = [i for i in tokens if i >= 256]
    assert specials == [i for i in make_template(TURNS).render(plain, BYTES)[1] if i >= 256]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.split('<|end|>')[0] }}",
        "{{ messages[0].content | length }}",
        "{{ messages[0].content | upper }}",
    ],
)
def test_special_strings_like_the_templates_are_refused(template):
    row = Row("a<|end|>b", "4", chat=True, location="a:1")
    with pytest.raises(ConfigError, match=r"a:1 holds <\|end\|>, which .* cannot be distinguished"):
        make_template(template).render(row, BYTES)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system, please') }}", "no system, please"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ (1).__class__.__bases__[0].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% set n = namespace(__class__=1) %}{% set n.__class__ = 2 %}", "must not hold"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_a_failing_template_names_its_row(template, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_template(template).render(CHAT, BYTES)
    assert "must render a:3" in str(caught.value) and "\n" not in str(caught.value)


def test_templates_get_tokens_start_date_and_json():
    start = datetime.datetime(2026, 2, 3)
    text = "{{ bos_token }}{{ strftime_now('%d %B') }}{{ messages[0].content | tojson }}{{ x }}"
    rendered = ChatTemplate(text, {"bos_token": "<s>"}, start).render([Message("user", "<é'>")])
    assert rendered == '<s>03 February"<é\'>"'
    effort = Template("auto", "", "low", ChatTemplate("{{ reasoning_effort }}", {}))
    assert effort.render(CHAT, BYTES)[0] == "low"


def test_the_template_is_read_from_transformers_places(tmp_path):
    assert load_chat_template("bytes") is None
    write_byte_tokenizer(tmp_path)
    assert load_chat_template(str(tmp_path)) is None
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    for written, text in (("c", "c"), (named, "d"), (named[:1], None)):
        file.write_text(json.dumps(settings | {"chat_template": written}))
        loaded = load_chat_template(str(tmp_path / "tokenizer.json"))
        assert (loaded and loaded.text) == text
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    loaded = load_chat_template(str(tmp_path))
    assert loaded.text == "{{ eos_token }}" and loaded.render([]) == "<|return|>"
    assert Template("auto", chat=loaded).render(CHAT, HFTokenizer(tmp_path))[1] == [258]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", "must be UTF-8"),
        ("chat_template.jinja", b"x" * 1_000_001, "at most 1,000,000 bytes"),
        ("tokenizer_config.json", b"[", "must be JSON"),
        ("tokenizer_config.json", b"[]", "must be a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} {message}|{name} must have {message}"):
        load_chat_template(str(tmp_path))
