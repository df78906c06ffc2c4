# SPDX-License-Identifier: Apache-2.0
"""Single-turn tasks: rows become prompts, answers become rewards.

Next: jaxmoe/train.py asks for prompts and scores what the engine makes of them.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxmoe.config import Config, ConfigError
from jaxmoe.data.pipeline import PromptIterator, make_prompt
from jaxmoe.data.pipeline import prompts as prompt_stream
from jaxmoe.data.rows import Source
from jaxmoe.data.sources import open_split
from jaxmoe.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from jaxmoe.rl.batch import supervised_batch
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.staleness import check_versions
from jaxmoe.shapes import Metrics

LOOK_S = 2.0  # to look at rows before a run; some sources compute theirs


@dataclass(frozen=True)
class Task:
    """A task's rows, the tokenizer, and how to sample answers to it."""

    tokenizer: Tokenizer
    train: Source
    held_out: Source
    template: str
    max_prompt_tokens: int
    sampling: Sampling

    def stream(self, count: int, seed: int, *, shard: int = 0, shards: int = 1) -> PromptIterator:
        """Endless shuffled lists of `count` training prompts; its state can be saved."""
        return prompt_stream(
            self.train, self.tokenizer, template=self.template, prompts_per_step=count,
            max_prompt_tokens=self.max_prompt_tokens, seed=seed,
            shard_index=shard, shard_count=shards,
        )  # fmt: skip

    def held_out_prompts(self) -> list[Prompt]:
        """All held-out rows, in order."""
        return [self._prompt(self.held_out, i) for i in range(len(self.held_out))]

    def check_prompts(self) -> None:
        """Name the longest prompt that does not fit, of the rows there is time for."""
        for source in (self.held_out, self.train):
            prompts = [self._prompt(source, i, limit=sys.maxsize) for i in self._some(source)]
            self._prompt(source, max(prompts, key=lambda p: len(p.tokens)).id)

    def check_answers(self, length: int) -> None:
        """Refuse stored answers that a warm start cannot take, likewise.

        Raises ConfigError where there is none, or the longest row has more than `length` tokens.
        """
        prompts = [self._prompt(self.train, i) for i in self._some(self.train)]
        pairs = [(prompt, answer_tokens(prompt, self)) for prompt in prompts]
        prompt, answer = max(pairs, key=lambda pair: len(pair[0].tokens) + len(pair[1]))
        supervised_batch([prompt], [answer], length=length, pad_id=self.tokenizer.pad_id)

    def _some(self, source: Source) -> Iterator[int]:
        """Rows to look at: as many as are held out, and more while there is time."""
        until = time.monotonic() + LOOK_S
        for row in range(len(source)):
            if row >= len(self.held_out) and time.monotonic() > until:
                return
            yield row

    def _prompt(self, source: Source, row: int, limit: int | None = None) -> Prompt:
        limit = self.max_prompt_tokens if limit is None else limit
        return make_prompt(source, row, self.tokenizer, self.template, limit)


def open_task(cfg: Config) -> Task:
    """The task of a config. Raises ConfigError for anything that could not be trained on."""
    tokenizer = load_tokenizer(cfg.init.tokenizer)
    _check_its_own(cfg, tokenizer)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    train, held_out = open_split(
        cfg.data.task, cfg.data.options,
        train_size=cfg.data.train_rows, eval_size=cfg.data.held_out_rows, seed=cfg.seed,
    )  # fmt: skip
    r = cfg.rollout
    sampling = Sampling(
        max_new_tokens=r.max_new_tokens, stop_ids=tuple(tokenizer.stop_ids),
        temperature=r.temperature, top_k=r.top_k, top_p=r.top_p,
    )  # fmt: skip
    return Task(tokenizer, train, held_out, cfg.data.template, cfg.data.max_prompt_tokens, sampling)


def _check_its_own(cfg: Config, tokenizer: Tokenizer) -> None:
    """Bytes are nobody's choice where the checkpoint brings another tokenizer."""
    folder = Path(cfg.init.checkpoint)
    own = cfg.init.checkpoint and (folder / "tokenizer.json").is_file()
    if cfg.init.tokenizer != "bytes" or not own:
        return
    said = "What is 27 + 15?"
    if load_tokenizer(str(folder)).encode(said) != tokenizer.encode(said):
        raise ConfigError(
            f"init.tokenizer must be that of init.checkpoint, got 'bytes'. "
            f"Try --set init.tokenizer={folder}."
        )


def answer_tokens(prompt: Prompt, task: Task) -> list[int]:
    """The stored answer and the stop token, as a warm start trains on them."""
    if prompt.answer is None:
        raise ConfigError(
            f"a warm start needs stored answers, and row {prompt.id} has none. "
            "Try --set warmup.steps=0."
        )
    return [*task.tokenizer.encode(prompt.answer), task.tokenizer.stop_ids[0]]


def response_text(rollout: Rollout, task: Task) -> str:
    """What the policy said, without its stop token."""
    cut = 1 if rollout.stop is StopReason.STOP_TOKEN else 0
    return task.tokenizer.decode(rollout.tokens[: len(rollout.tokens) - cut].tolist())


def score(rollouts: Sequence[Rollout], source: Source, task: Task) -> np.ndarray:
    """Reward of each rollout, in [0, 1]; a scorer never raises."""
    return np.array(
        [source.score(response_text(r, task), r.prompt.id) for r in rollouts], np.float32
    )


def evaluate(
    engine: Engine, prompts: Sequence[Prompt], task: Task, *, version: int, samples: int = 2
) -> tuple[Metrics, list[Rollout], np.ndarray]:
    """Exact-match accuracy on held-out prompts, sampled as in training and greedy.

    eval/accuracy is the mean reward of `samples` answers a prompt at the training temperature,
    which is what RL raises; eval/accuracy_greedy takes the most likely token each time. Also
    returns the greedy rollouts and their rewards. The same seed every time.
    Raises EngineError where an answer is not by weights `version`.
    """
    greedy = replace(task.sampling, temperature=0.0, top_k=0, top_p=1.0)
    rollouts = engine.generate(prompts, greedy, seed=0)
    rewards = score(rollouts, task.held_out, task)
    sampled = engine.generate(prompts, task.sampling, seed=1, samples=samples)
    check_versions([*rollouts, *sampled], newest=version, max_staleness=0)
    metrics = {
        "eval/accuracy": float(score(sampled, task.held_out, task).mean()),
        "eval/accuracy_greedy": float(rewards.mean()),
    }
    return metrics, rollouts, rewards
