# SPDX-License-Identifier: Apache-2.0
"""Environments that replace the context: what the policy reads, in tokens."""

import dataclasses

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.render import write_messages, write_turn
from jaxmoe.data.rows import Message
from jaxmoe.data.templates import HARMONY, Template
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tool_specs import read_tools
from jaxmoe.environments.transcripts import make_transcript
from jaxmoe.records import StopReason
from tests.jaxmoe.environments.scripted_episodes import (
    CALL,
    FINAL,
    SAMPLING,
    TOKENIZER,
    Echo,
    sample,
)

QUESTION = [Message("user", "question")]
THOUGHT = [
    Message("assistant", "a long thought", channel="analysis"),
    Message("assistant", "17", channel="final"),
]


def render(messages, **fields):
    return Template(HARMONY, **fields).render_messages(messages, TOKENIZER)[1]


class Scripted(Echo):
    """One result of `step` for each turn, the last of which ends the episode."""

    results: list = []

    def reset(self, row, *, seed):
        self.n = 0
        return QUESTION, {}

    def step(self, messages):
        messages, info = self.results[self.n]
        self.n += 1
        return messages, 0.5, self.n == len(self.results), False, info


def run(*results, turns=(FINAL,), wrap=lambda x: x, **settings):
    class Environment(Scripted):
        pass

    Environment.results = [*results, ([], {})]
    settings.setdefault("allows_contexts", True)
    (rollout, *_) = sample(lambda: wrap(Environment()), *turns, samples=1, **settings)
    return rollout


def contexts_of(rollout):
    """The tokens of each context."""
    ends = [*rollout.context_starts, len(rollout.tokens)]
    starts = [0, *rollout.context_starts]
    parts = [rollout.tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
    return [[*rollout.prompt.tokens, *parts[0]], *parts[1:]]


def test_a_new_context_is_all_that_is_read():
    summary = [Message("user", "question"), Message("user", "summary: 6 * 7")]
    rollout = run(([Message("user", "go on")], {"context": summary}))
    turn = write_turn(FINAL, TOKENIZER)
    assert contexts_of(rollout) == [
        [*render(QUESTION), *turn],
        [*render([*summary, Message("user", "go on")]), *turn],
    ]
    assert rollout.turns == [(0, len(turn)), (len(rollout.tokens) - len(turn), len(rollout.tokens))]
    assert rollout.stop is StopReason.STOP_TOKEN and rollout.env_rewards == {
        "env": 1.0,
        "late": 0.25,
    }
    # Each turn's reward stands at its own end.
    assert np.flatnonzero(rollout.token_rewards).tolist() == [
        len(turn) - 1,
        len(rollout.tokens) - 1,
    ]


def test_a_sub_agent_reads_its_prompt_alone():
    """The outer conversation goes on with the tokens that it had."""
    inner = [Message("system", "You summarise."), Message("user", "text")]
    result = [Message("tool", "short", name="functions.ask")]
    rollout = run(
        ([], {"sub_agent": inner}),
        ([Message("user", "shorter")], {}),
        (result, {"sub_agent_ends": True}),
        turns=(CALL, FINAL, FINAL, FINAL),
    )
    call, final = write_turn(CALL, TOKENIZER), write_turn(FINAL, TOKENIZER)
    outer = [*render(QUESTION), *call]
    assert contexts_of(rollout) == [
        outer,
        [*render(inner), *final, *write_messages([Message("user", "shorter")], TOKENIZER), *final],
        [*outer, *write_messages(result, TOKENIZER), *final],
    ]
    # The call is trained on in the first context alone.
    assert [b - a for a, b in rollout.turns] == [len(call), *[len(final)] * 3]


def test_sub_agents_may_have_sub_agents():
    inner, innermost = [Message("user", "inner")], [Message("user", "innermost")]
    rollout = run(
        ([], {"sub_agent": inner}),
        ([], {"sub_agent": innermost}),
        ([Message("user", "a")], {"sub_agent_ends": True}),
        ([Message("user", "b")], {"sub_agent_ends": True}),
        sampling=dataclasses.replace(SAMPLING, max_turns=5),
    )
    final = write_turn(FINAL, TOKENIZER)
    added = {x: write_messages([Message("user", x)], TOKENIZER) for x in "ab"}
    assert contexts_of(rollout)[2:] == [
        [*render(innermost), *final],
        [*render(inner), *final, *added["a"], *final],
        [*render(QUESTION), *final, *added["b"], *final],
    ]


@pytest.mark.parametrize("keeps", [False, True])
def test_earlier_analysis_leaves_as_where_it_is_served(keeps):
    again = Message("user", "again")
    rollout = run(([again], {}), turns=(THOUGHT,), template=Template(HARMONY, keep_analysis=keeps))
    turn = write_turn(THOUGHT, TOKENIZER)
    if keeps:
        added = write_messages([again], TOKENIZER)
        assert contexts_of(rollout) == [[*render(QUESTION), *turn, *added, *turn]]
    else:
        fewer = render([*QUESTION, THOUGHT[1], again])
        assert contexts_of(rollout) == [[*render(QUESTION), *turn], [*fewer, *turn]]
        # As a prompt of a row with these turns is written.
        assert fewer == render([*QUESTION, *THOUGHT, again])


def test_dropped_analysis_of_a_context_is_dropped_once():
    """The tokens before a tool's reply stay those that were sampled."""
    history = [*QUESTION, *THOUGHT, Message("user", "again")]
    rollout = run(
        ([], {"context": history}),
        ([Message("tool", "42", name="python")], {}),
        turns=(FINAL, CALL, FINAL),
    )
    assert len(rollout.context_starts) == 1 and len(rollout.turns) == 3


def test_analysis_stays_while_tools_are_called():
    thought = [THOUGHT[0], *CALL]
    rollout = run(
        ([Message("tool", "42", name="python")], {}),
        turns=(thought, FINAL),
        template=Template(HARMONY),
    )
    assert not rollout.context_starts and len(rollout.turns) == 2


def test_tools_beside_the_environment_leave_its_context():
    """Calls before the last message of a turn are answered, and the environment's context stays."""
    summary = [Message("user", "summary")]
    rollout = run(
        ([], {"context": summary}),
        turns=([*CALL, *FINAL], FINAL),
        wrap=lambda inner: ToolEnvironment(read_tools("python"), inner),
    )
    assert len(rollout.context_starts) == 1
    read = TOKENIZER.decode(contexts_of(rollout)[1])
    assert "summary" in read and "question" not in read and "42" in read


@pytest.mark.parametrize(
    "messages, info, fault",
    [
        ([], {"context": 5}, "messages must be a list"),
        ([], {"context": []}, "must have a message"),
        ([], {"context": QUESTION, "sub_agent": QUESTION}, "info may have one of"),
        (QUESTION, {"sub_agent": QUESTION}, "must return no others, got 1"),
        (QUESTION, {"sub_agent_ends": True}, "needs an open sub-agent"),
        (QUESTION, {"sub_agent_ends": "yes"}, "must be True or False"),
        ([], {"context": [{"role": "king", "content": ""}]}, "must have a role"),
    ],
)
def test_a_wrong_context_loses_its_episode_alone(messages, info, fault):
    rollout = run((messages, info))
    assert rollout.lost == "env_error" and fault in rollout.env_fault


def test_a_run_without_room_for_contexts_is_stopped():
    with pytest.raises(ConfigError, match=r"--set rollout\.max_episode_tokens=8192"):
        run(([], {"context": QUESTION}), allows_contexts=False)


def test_a_transcript_names_the_new_context():
    rollout = run(([], {"context": [Message("user", "summary")]}))
    entries = [(e.speaker, e.text) for e in make_transcript(rollout, TOKENIZER)]
    n = len(render([Message("user", "summary")]))
    assert ("new context", f"{n} tokens") in entries and ("user", "summary") in entries
    assert entries[-1] == ("assistant", "42")
