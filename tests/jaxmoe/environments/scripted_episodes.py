# SPDX-License-Identifier: Apache-2.0
"""An engine that speaks a script and an environment that repeats it, for tests of episodes."""

import numpy as np

from jaxmoe.data.harmony.render import write_turn
from jaxmoe.data.rows import Message, Row
from jaxmoe.data.templates import HARMONY, Template
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.environments.episodes import EpisodeSettings, sample_rollouts
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tool_specs import read_tools
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.replies import PendingReplies, ReplyThreads
from jaxmoe.rollout.turns import Episode

TOKENIZER = ByteTokenizer()
SAMPLING = Sampling(
    max_new_tokens=900, stop_ids=tuple(TOKENIZER.stop_ids), max_turns=4, max_context=4096
)
FINAL = [Message("assistant", "42", channel="final")]
CALL = [Message("assistant", "6*7", channel="analysis", recipient="python")]


class Rows:
    """A source of three rows."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return Row(f"question {index}", "42")

    def score(self, response, index):
        return float(response == "42")


class ScriptedEngine:
    """Speaks the turns of a script, the last one again and again, with real reply threads."""

    incidents = ()

    def __init__(self, *turns):
        self.turns = turns

    def load(self, params, version):
        raise AssertionError("it has no weights")

    def close(self):
        pass

    def ids(self, number):
        turn = self.turns[min(number, len(self.turns) - 1)]
        if isinstance(turn, str):
            return TOKENIZER.encode(turn, specials=True)
        return write_turn(turn, TOKENIZER)

    def generate(self, prompts, sampling, *, seed, samples=1, environment=None):
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        episodes = [Episode(prompt, sampling, sampling.max_context) for prompt in repeated]
        assert environment is not None
        pending = PendingReplies(environment)

        def speak(i):
            ids = np.array(self.ids(episodes[i].n_turns), np.int32)[: episodes[i].turn_limit]
            episodes[i].add_turn(ids, np.full(len(ids), -0.5), np.zeros(len(ids)))
            if episodes[i].stop is None:
                pending.submit(i, ids.tolist())

        for i in range(len(episodes)):
            speak(i)
        while len(pending):
            for i, reply in pending.wait(environment.patience_s).items():
                if episodes[i].add_reply(reply):
                    speak(i)
        return [episode.make_rollout() for episode in episodes]


def sample(
    make_environment, *turns, samples=2, limit=4000, template=None, sampling=SAMPLING, **settings
):
    settings.setdefault("threads", ReplyThreads(16))
    rows = Rows()
    prompts = [Prompt(i, rows[i].question, (1, 2), "42") for i in range(len(rows))]
    return sample_rollouts(
        ScriptedEngine(*turns),
        prompts,
        sampling,
        seed=3,
        samples=samples,
        settings=EpisodeSettings(make_environment, **settings),
        source=rows,
        template=template or Template(HARMONY),
        tokenizer=TOKENIZER,
        max_prompt_tokens=limit,
    )


def with_python():
    return ToolEnvironment(read_tools("python"))


class Echo:
    """Repeats the policy; `step_result` is returned or raised instead, if it is set."""

    tools = ()
    step_result = None
    opened, closed = 0, 0

    def reset(self, row, *, seed):
        Echo.opened += 1
        return [Message("user", f"{row.question} {seed % 97}")], {}

    def step(self, messages):
        result = type(self).step_result
        if isinstance(result, BaseException):
            raise result
        if callable(result):
            return result(messages)
        if result is not None:
            return result
        return [Message("user", messages[-1].content)], 0.5, False, False, {}

    def close(self):
        Echo.closed += 1
        return {"late": 0.25}


def make_echo(**attributes):
    return type("EchoOfATest", (Echo,), attributes)
