# SPDX-License-Identifier: Apache-2.0
"""The header of a harmony message: its role, channel, recipient and content type.

A header is the text between `<|start|>` and `<|message|>`, such as
`assistant<|channel|>commentary to=functions.search <|constrain|>json`.
Next: jaxmoe/data/harmony/parse.py splits a turn into messages.
"""

import re

from jaxmoe.data.rows import Message

CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
# White space as Unicode defines it. `str.strip` would also remove U+001C to U+001F.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + f"([^<{_SPACES}]*)")
_PART = re.compile(r"[^ \t\n\f\r]+")
_CONTENT_TYPE = re.compile(r"[\w/+-]*")  # json, code; names of tools have a dot


class HeaderError(ValueError):
    """A malformed header. `is_forged`: it is in the name of another role than the assistant."""

    def __init__(self, problem: str, *, is_forged: bool = False) -> None:
        super().__init__(problem)
        self.is_forged = is_forged


def parse_header(text: str, *, has_role: bool = False) -> Message:
    """Parse the header of an assistant's message; the message returned has an empty content.

    The first `<|channel|>NAME` is the channel, further ones are ignored. Of the other parts, which
    white space separates, the first is the role; a part `to=NAME`, or a single part, is the
    recipient; a part behind the recipient is the content type. This is the grammar of oss-harmony,
    with one exception: a single
    part `<|constrain|>NAME` is the content type, unless NAME has the form of a tool's name. The
    `<|constrain|>` itself is not part of a recipient or a content type.

    has_role: the text begins behind the role, which the prompt has written.

    Raises: HeaderError.
    """
    channel = next(iter(_CHANNEL_NAME.findall(text)), "")
    if CHANNEL in text and not channel:
        raise HeaderError(f"{CHANNEL} without the name of a channel")
    text = _CHANNEL_NAME.sub("", text)
    text = text.strip(_SPACES).replace(CONSTRAIN, f" {CONSTRAIN}").strip(_SPACES)
    parts = _PART.findall(text)
    if not has_role:
        check_role(parts[0] if parts else "")
    if parts[:1] == ["assistant"]:
        del parts[0]
    if len(parts) > 2 or (len(parts) == 2 and parts[1].startswith("to=")):
        raise HeaderError(f"a header with too many parts, {text!r:.80}")
    recipient, content_type = (*parts, "", "")[:2]
    if not content_type and recipient.startswith(CONSTRAIN):
        name = recipient.removeprefix(CONSTRAIN)
        if _CONTENT_TYPE.fullmatch(name):
            recipient, content_type = "", name
    return Message(
        "assistant",
        "",
        channel=channel,
        recipient=recipient.removeprefix("to=").removeprefix(CONSTRAIN),
        content_type=content_type.removeprefix(CONSTRAIN),
    )


def check_role(role: str, *, is_cut: bool = False) -> None:
    """Raise HeaderError unless a header's role is the assistant's.

    is_cut: the turn ends inside the header, so that the rest of the role may be missing.
    """
    if role == "assistant" or (is_cut and "assistant".startswith(role)):
        return
    if not role:
        raise HeaderError("a header without a role")
    is_name = "<|" not in role and not role.startswith(("assistant", "to="))
    raise HeaderError(
        f"a message in the name of {role!r:.40}" if is_name else f"no role is {role!r:.40}",
        is_forged=is_name,
    )
