# SPDX-License-Identifier: Apache-2.0
"""Prompts of chat rows are those of transformers' apply_chat_template, byte for byte."""

import pytest

from jaxmoe.data.chat_template import load_chat_template
from jaxmoe.data.rows import Message, Row
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import HFTokenizer, write_byte_tokenizer

pytestmark = pytest.mark.parity

# what published templates do: trim, loops with breaks, namespaces, dates, JSON, marked answers
TEMPLATES = {
    "turns": """
{%- for m in messages %}
    {{- '<|start|>' + m['role'] + '<|message|>' + m['content'] | trim + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}<|start|>assistant<|message|>
{% endif %}""",
    "namespace": """{{ bos_token }}{% set ns = namespace(system='', seen=false) %}
{% for m in messages %}
  {% if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}
  {% if m.role == 'user' and not ns.seen and ns.system %}
[{{ ns.system }}] {% set ns.seen = true %}
  {% endif %}
  {%- if m.role == 'assistant' %}
    {%- generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}
  {%- else %}<|start|>{{ m.content }}<|end|>{% endif %}
{% endfor %}""",
    "odd": """{% if tools is not none or documents %}no{% endif %}
{{- strftime_now('%Y-%m-%d') }} {{ reasoning_effort | upper }}
{%- set first = dict(role='x') %}{{ first | tojson }}{{ messages | tojson(indent=2) }}
{%- for m in messages[::-1] %}{% if loop.index > 2 %}{% break %}{% endif %}
{{ loop.index0 }}{{ m.content.split('\\n')[-1].strip() }}{{ m.content[:3] }}{{ pad_token }}
{% endfor %}{{ missing }}{% if m is defined %}!{% endif %}""",
}
CHATS = [
    Row("2+2=", "4", chat=True),
    Row("\n <é & 'quote'> \n\n", "4", system='Be "brief".\n', chat=True),
    Row("again", "4", earlier=(Message("user", " hi"), Message("assistant", "yo\n\n ")), chat=True),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers: pip install -e '.[parity]'"
    )
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    template = Template("auto", chat=load_chat_template(str(tmp_path)))
    tokenizer = HFTokenizer(tmp_path)
    for row in CHATS:
        system = [{"role": "system", "content": row.system}] if row.system else []
        turns = [*row.earlier, Message("user", row.question)]
        chat = [*system, *({"role": m.role, "content": m.content} for m in turns)]
        options = {"add_generation_prompt": True, "reasoning_effort": "medium"}
        text = hf_tokenizer.apply_chat_template(chat, tokenize=False, **options)
        tokens = hf_tokenizer.apply_chat_template(chat, return_dict=False, **options)
        assert template.render(row, tokenizer) == (text, tokens)
