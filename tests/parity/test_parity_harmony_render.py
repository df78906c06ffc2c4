# SPDX-License-Identifier: Apache-2.0
"""Messages, tools and prompts have the tokens that oss-harmony gives them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.data.harmony.parse import read_turn
from jaxmoe.data.harmony.render import write_messages, write_turn
from jaxmoe.data.harmony.tools import write_developer_text, write_system_text
from jaxmoe.data.rows import Message, ToolDescription
from jaxmoe.data.templates import Template

pytestmark = pytest.mark.parity

TEXT = st.text(max_size=20) | st.sampled_from(
    ["<|end|>", "a<|start|>assistant", "one\ntwo", "\r\n", '"quoted" \\', "x\n", "é 😀"]
)
NAME = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
# Their parser of JSON is off by a last bit in some numbers of more than 15 digits.
NUMBER = st.integers(-(10**15), 10**15) | st.sampled_from(
    [1e16, 1.5e-5, -1e-5, 1e-6, 1.5e-7, 1e100, -0.0, 0.1, 12.75, 2**63, 2**64, -(2**63) - 1]
)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def combine(types):
    return st.fixed_dictionaries(
        {},
        optional={
            "type": types,
            "description": TEXT,
            "default": VALUE,
            "title": TEXT,
            "enum": st.lists(TEXT | st.integers(), max_size=3),
            "nullable": st.booleans(),
            "examples": st.lists(TEXT | st.integers(), max_size=2),
            "const": VALUE,
        },
    )


LEAF = combine(
    st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object", "odd"])
    | st.lists(st.sampled_from(["string", "integer", "null"]), max_size=3)
)


def extend(inner):
    extra = st.fixed_dictionaries(
        {},
        optional={
            "items": inner,
            "oneOf": st.lists(inner, max_size=3),
            "anyOf": st.lists(inner),
            "properties": st.dictionaries(NAME, inner, max_size=3),
            "required": st.lists(NAME, max_size=2),
        },
    )
    typed = combine(st.sampled_from(["object", "object", "array", "string"]))
    return st.builds(lambda a, b: {**a, **b}, typed, extra)


SCHEMA = st.recursive(LEAF, extend, max_leaves=8)
OBJECT = st.builds(
    lambda properties, required: {
        "type": "object",
        "properties": properties,
        "required": [n for n, needed in zip(properties, required, strict=False) if needed],
    },
    st.dictionaries(NAME, SCHEMA, max_size=4),
    st.lists(st.booleans(), max_size=4),
)
TOOLS = st.lists(
    st.builds(ToolDescription, NAME.filter(lambda n: n != "python"), TEXT, OBJECT | SCHEMA),
    max_size=3,
    unique_by=lambda tool: tool.name,
)
MESSAGE = st.one_of(
    st.builds(Message, st.sampled_from(["user", "system", "developer"]), TEXT),
    st.builds(Message, st.just("user"), TEXT, name=st.just("bob")),
    st.builds(
        Message,
        st.just("assistant"),
        TEXT,
        channel=st.sampled_from(["", "analysis", "commentary", "final"]),
        recipient=st.sampled_from(["", "python", "functions.search"]),
        content_type=st.sampled_from(["", "code", "json"]),
    ),
    st.builds(
        Message,
        st.just("tool"),
        TEXT,
        name=st.sampled_from(["python", "functions.search"]),
        channel=st.sampled_from(["analysis", "commentary"]),
        recipient=st.just("assistant"),
    ),
)
MANY = settings(max_examples=200, deadline=None)


def make_theirs(harmony, message):
    m = harmony.module
    author = m.Author(role=m.Role(message.role), name=message.name or None)
    conversation_message = m.Message.from_author_and_content(author, message.content)
    conversation_message.channel = message.channel or None
    conversation_message.recipient = message.recipient or None
    conversation_message.content_type = message.content_type or None
    return conversation_message


def make_tools(harmony, tools):
    return [
        harmony.module.ToolDescription.new(
            t.name, t.description, dict(t.parameters) if t.parameters else None
        )
        for t in tools
    ]


def test_messages_have_the_same_tokens(harmony):
    keep = harmony.module.RenderConversationConfig(auto_drop_analysis=False)

    @MANY
    @given(st.lists(MESSAGE, max_size=5))
    def check(messages):
        m, encoding = harmony.module, harmony.encoding
        conversation = m.Conversation.from_messages([make_theirs(harmony, x) for x in messages])
        assert write_messages(messages, harmony.tokenizer) == (
            encoding.render_conversation_for_completion(conversation, m.Role.ASSISTANT, keep)
        )

    check()


def test_a_prompt_and_turn_have_their_training_tokens(harmony):
    keep = harmony.module.RenderConversationConfig(auto_drop_analysis=False)
    question = Message("user", "q")
    thought = Message("assistant", "hm", channel="analysis")
    call = Message("assistant", "1", channel="analysis", recipient="python", content_type="code")
    for turn in ([Message("assistant", "a", channel="final")], [thought, call]):
        conversation = harmony.module.Conversation.from_messages(
            [make_theirs(harmony, x) for x in (question, *turn)]
        )
        actual = write_messages([question], harmony.tokenizer) + write_turn(turn, harmony.tokenizer)
        assert actual == harmony.encoding.render_conversation_for_training(conversation, keep)


def test_we_and_harmony_read_what_turns_write(harmony):
    tokens, m = harmony.tokenizer, harmony.module
    prompt = write_messages([Message("user", "q")], tokens)
    turn = [
        Message("assistant", "I add <|end|>", channel="analysis"),
        Message("assistant", "Wait.", channel="commentary"),
        Message(
            "assistant",
            '{"a": 1}',
            channel="commentary",
            recipient="functions.add",
            content_type="json",
        ),
    ]
    ids = write_turn(turn, tokens)
    assert read_turn(prompt, ids, tokens).messages == tuple(turn)
    assert read_turn(prompt, ids, tokens).calls == (turn[-1],)
    parsed = harmony.encoding.parse_messages_from_completion_tokens(ids, m.Role.ASSISTANT)
    assert [(x.channel, x.recipient) for x in parsed] == [
        ("analysis", None),
        ("commentary", None),
        ("commentary", "functions.add"),
    ]


def test_prompts_of_messages_and_tools_have_equal_tokens(harmony):
    m, encoding = harmony.module, harmony.encoding
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    tools = [ToolDescription("search", "Finds.", schema), ToolDescription("python", "", {})]
    chat = [
        Message("user", "q <|end|>"),
        Message(
            "assistant",
            "{}",
            channel="commentary",
            recipient="functions.search",
            content_type="json",
        ),
        Message(
            "tool", "found", name="functions.search", channel="commentary", recipient="assistant"
        ),
    ]
    developer = m.DeveloperContent.new().with_instructions("Be brief.")
    conversation = m.Conversation.from_messages(
        [
            m.Message.from_role_and_content(
                m.Role.SYSTEM, m.SystemContent.new().with_python_tool()
            ),
            m.Message.from_role_and_content(
                m.Role.DEVELOPER, developer.with_function_tools(make_tools(harmony, tools[:1]))
            ),
            *(make_theirs(harmony, message) for message in chat),
        ]
    )
    for template, messages in (
        (Template("harmony"), [Message("system", "Be brief."), *chat]),
        (Template("harmony", "Be brief."), chat),
    ):
        text, tokens = template.render_messages(messages, harmony.tokenizer, tools)
        assert tokens == encoding.render_conversation_for_completion(conversation, m.Role.ASSISTANT)
        assert text == encoding.decode(tokens)


def test_sections_of_tools_have_the_same_tokens(harmony):
    m = harmony.module

    @MANY
    @given(TEXT, TOOLS, st.booleans(), st.sampled_from(list(m.ReasoningEffort)))
    def check(instructions, tools, with_python, effort):
        system = m.SystemContent.new().with_reasoning_effort(effort)
        developer = m.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions(instructions)
        if with_python:
            system = system.with_python_tool()
        if tools:
            developer = developer.with_function_tools(make_tools(harmony, tools))
        conversation = m.Conversation.from_messages(
            [
                m.Message.from_role_and_content(m.Role.SYSTEM, system),
                m.Message.from_role_and_content(m.Role.DEVELOPER, developer),
            ]
        )
        declared = [*tools, *([ToolDescription("python", "", {})] if with_python else [])]
        assert write_messages(
            [
                Message("system", write_system_text(effort.value.lower(), declared)),
                Message("developer", write_developer_text(instructions, declared)),
            ],
            harmony.tokenizer,
        ) == harmony.encoding.render_conversation_for_completion(conversation, m.Role.ASSISTANT)

    check()
