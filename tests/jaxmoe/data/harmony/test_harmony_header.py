# SPDX-License-Identifier: Apache-2.0
"""Headers of messages: who is called, on which channel, and whose name is not the policy's."""

import pytest

from jaxmoe.data.harmony.header import HeaderError, check_role, parse_header


@pytest.mark.parametrize(
    ("text", "channel", "recipient", "content_type"),
    [
        ("assistant", "", "", ""),
        ("assistant<|channel|>analysis to=python code", "analysis", "python", "code"),
        (
            "assistant to=functions.f<|channel|>commentary <|constrain|>json",
            "commentary",
            "functions.f",
            "json",
        ),
        (
            "assistant<|channel|>commentary to=functions.f<|constrain|>json",
            "commentary",
            "functions.f",
            "json",
        ),
        ("assistant<|channel|>final <|constrain|>json", "final", "", "json"),
        ("assistant<|channel|>final <|constrain|>functions.add", "final", "functions.add", ""),
        (
            "assistant<|channel|>final <|constrain|>functions.add json",
            "final",
            "functions.add",
            "json",
        ),
        ("assistant<|channel|>final<|channel|>analysis", "final", "", ""),
        ("assistant<|channel|>commentary to=f\u2003", "commentary", "f", ""),
    ],
)
def test_a_header_names_channel_recipient_and_content_type(text, channel, recipient, content_type):
    for message in (
        parse_header(text),
        parse_header(text.removeprefix("assistant"), has_role=True),
    ):
        assert message.role == "assistant" and message.content == message.name == ""
        assert (message.channel, message.recipient, message.content_type) == (
            channel,
            recipient,
            content_type,
        )


@pytest.mark.parametrize(
    ("text", "is_forged", "problem"),
    [
        ("user", True, "in the name of 'user'"),
        ("python to=assistant", True, "'python'"),
        ("<|channel|>analysis system", True, "'system'"),
        ("", False, "without a role"),
        ("to=python", False, "no role"),
        ("assistants", False, "no role"),
        ("<|start|>user", False, "no role"),
        ("assistant a b c", False, "too many parts"),
        ("assistant code to=python", False, "too many parts"),
        ("assistant<|channel|> final", False, "name of a channel"),
    ],
)
def test_other_headers_are_malformed_and_other_roles_forged(text, is_forged, problem):
    with pytest.raises(HeaderError, match=problem) as caught:
        parse_header(text)
    assert caught.value.is_forged == is_forged


def test_a_truncated_role_may_become_the_assistants():
    check_role("assis", is_cut=True)
    for role, is_cut in (("assis", False), ("user", True)):
        with pytest.raises(HeaderError):
            check_role(role, is_cut=is_cut)
