# SPDX-License-Identifier: Apache-2.0
"""Turns as oss-harmony's strict parser reads them, with the tokenizer of GPT-OSS."""

import collections
import itertools
import random
import re

import pytest

from jaxmoe.data.harmony.parse import read_response, read_turn

pytestmark = pytest.mark.parity

MARKS = "<|channel|> <|message|> <|end|> <|start|> <|return|> <|call|> <|constrain|>".split()
WORDS = [
    "final",
    "analysis",
    "commentary",
    " to=python",
    " to=functions.f",
    "functions.f",
    " code",
    "json",
    "assistant",
    " assistant",
    "user",
    "python",
    "system",
    "hello",
    "6",
    " ",
    "\n",
    "\u00a0",
    "\x1c",
    "print(1)",
    "<|endoftext|>",
    "😀",
    "to=",
    "é",
]


def make_turn(rng):
    """A well-formed turn after `<|start|>assistant`."""
    turn = ""
    for i in range(rng.randint(1, 3)):
        turn += "<|start|>assistant" if i else ""
        channel = "<|channel|>" + rng.choice(["analysis", "final", "commentary"])
        recipient = rng.choice(["", " to=python", " to=functions.f"])
        kind = (
            rng.choice(["", " code", " <|constrain|>json", "<|constrain|>json"])
            if recipient
            else (rng.choice(["", "", "", " <|constrain|>json", "<|constrain|>functions.f"]))
        )
        body = "".join(rng.choices(WORDS, k=rng.randint(0, 4)))
        end = rng.choice(["<|return|>", "<|call|>"]) if i == 2 else "<|end|>"
        turn += (
            rng.choice([recipient + channel + kind, channel + recipient + kind])
            + "<|message|>"
            + body
            + end
        )
    return turn


def break_turn(rng):
    """A turn with one to three parts removed, added or replaced."""
    parts = re.split(r"(<\|\w+\|>)", make_turn(rng))
    for _ in range(rng.randint(1, 3)):
        k, change = rng.randrange(len(parts)), rng.random()
        word = rng.choice(MARKS + WORDS)
        parts[k : k + (change > 0.35)] = [] if change > 0.7 else [word]
        parts = parts or ["x"]
    return "".join(parts)


def parse_strictly(harmony, ids):
    """(messages before the first error, the error or "") of oss-harmony's strict parser."""
    parser = harmony.module.StreamableParser(harmony.encoding, harmony.module.Role.ASSISTANT)
    error = ""
    try:
        for token in ids:
            parser.process(token)
        parser.process_eos()
    except Exception as raised:  # HarmonyError is not exported
        error = str(raised)
    return [
        (
            m.author.role.value,
            m.channel or "",
            m.recipient or "",
            m.content_type or "",
            m.content[0].text,
        )
        for m in parser.messages
    ], error


def drop_constrain(message):
    """The one difference in well-formed messages: <|constrain|> is in no field."""
    role, channel, recipient, kind, text = message
    if not kind and re.fullmatch(r"<\|constrain\|>[\w/+-]*", recipient):
        recipient, kind = "", recipient
    recipient, kind = (field.removeprefix("<|constrain|>") for field in (recipient, kind))
    return role, channel, recipient, kind, text


def test_ten_thousand_turns_are_the_same_messages(harmony):
    tokens, rng = harmony.tokenizer, random.Random(0)
    prompt = tokens.encode("<|start|>user<|message|>q<|end|><|start|>assistant", specials=True)
    counts = collections.Counter()
    for i in range(10_000):
        text = make_turn(rng) if i % 2 else break_turn(rng)
        ids = tokens.encode(text, specials=True)
        expected, error = parse_strictly(harmony, ids)
        turn = read_turn(prompt, ids, tokens)
        actual = [
            (m.role, m.channel, m.recipient, m.content_type, m.content) for m in turn.messages
        ]
        forged = next((k for k, m in enumerate(expected) if m[0] != "assistant"), len(expected))
        assert actual == list(map(drop_constrain, expected[:forged])), (text, turn)
        if forged < len(expected):
            assert turn.problem and not turn.is_truncated, text
        elif error:
            assert turn.problem, (text, error)
            assert turn.is_truncated == ("EOS" in error) or turn.is_forged, (text, turn, error)
        else:
            assert turn.is_truncated == (turn.ends[-1] == "") == bool(turn.problem), (text, turn)
        counts[bool(i % 2), turn.is_forged, turn.is_truncated, bool(turn.problem)] += 1
        read_response(prompt, ids[:-1], tokens, stop=ids[-1:])
    assert counts[True, False, False, False] == 5_000
    kinds = [k for k in counts if not k[0]]
    assert len(kinds) == 4 and min(counts[k] for k in kinds) > 100, counts


def test_turns_of_random_ids_are_the_same_messages(harmony):
    """Bytes that are no text, and special tokens that harmony has no use for."""
    tokens, rng = harmony.tokenizer, random.Random(1)
    prompt = tokens.encode("<|start|>assistant", specials=True)
    specials = list(tokens.specials.values())
    for _ in range(2_000):
        ids = [
            rng.choice([rng.randrange(256), rng.randrange(199_998), rng.choice(specials[:12])])
            for _ in range(rng.randint(0, 10))
        ]
        start = rng.randint(0, min(2, len(ids)))
        ids[start:start] = tokens.encode(make_turn(rng), specials=True)[: rng.randint(2, 12)]
        expected, error = parse_strictly(harmony, ids)
        turn = read_turn(prompt, ids, tokens)
        actual = [
            (m.role, m.channel, m.recipient, m.content_type, m.content) for m in turn.messages
        ]
        expected = itertools.takewhile(lambda m: m[0] == "assistant", expected)
        assert actual == list(map(drop_constrain, expected)), (ids, turn)
        assert turn.problem or not error, (ids, error)
