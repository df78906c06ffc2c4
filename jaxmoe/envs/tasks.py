# SPDX-License-Identifier: Apache-2.0
"""Single-turn tasks: rows become prompts, answers become rewards.

Next: jaxmoe/train.py asks for prompts and scores what the engine makes of them.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from jaxmoe.checkpoint.same_run import weights_digest
from jaxmoe.config import Config, ConfigError
from jaxmoe.data.chat_template import load_chat_template
from jaxmoe.data.files import FileSource
from jaxmoe.data.harmony import answer_opening, read_response
from jaxmoe.data.overlong import Overlong
from jaxmoe.data.pipeline import PromptIterator, make_prompt
from jaxmoe.data.pipeline import prompts as prompt_stream
from jaxmoe.data.rows import Source, Subset
from jaxmoe.data.sources import open_split
from jaxmoe.data.templates import AUTO, CHAT, Template
from jaxmoe.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer, tokenizer_digest
from jaxmoe.envs.conventions import Sample
from jaxmoe.envs.reward_process import RewardProcess, Runner, run_here
from jaxmoe.envs.rewards import (
    Reward,
    Rewarded,
    Tell,
    counted,
    part_metrics,
    read_rewards,
    score_samples,
    silent,
)
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from jaxmoe.rl.batch import supervised_batch
from jaxmoe.rl.source_digests import source_digests
from jaxmoe.rollout.check_rollouts import check_order
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.staleness import check_versions
from jaxmoe.shapes import Metrics

LOOK_ROWS = 16  # whose columns rewards may ask for
LOOK_S = 2.0  # to look at rows before a run; some sources compute theirs


@dataclass(frozen=True)
class Task:
    """A task's rows, the tokenizer, and how to sample answers to it."""

    tokenizer: Tokenizer
    train: Source
    held_out: Source
    template: Template
    max_prompt_tokens: int
    sampling: Sampling
    rewards: tuple[Reward, ...] = ()  # none: the source scores
    overlong: Overlong | None = None  # None: a prompt that is too long is refused
    run_rewards: Runner = run_here  # calls the functions of data.rewards
    steps: int = 0  # of the run, for functions that ask how far it is
    shuffle: bool = True  # the rows to train on, each epoch anew

    @property
    def score_name(self) -> str:
        """The name to show for eval/accuracy: a user's rewards may be negative, or sums past 1."""
        return "mean reward" if self.rewards else "accuracy"

    def stream(self, count: int, seed: int, *, shard: int = 0, shards: int = 1) -> PromptIterator:
        """Endless shuffled lists of `count` training prompts; its state can be saved."""
        return prompt_stream(
            self.train, self.tokenizer, template=self.template, prompts_per_step=count,
            max_prompt_tokens=self.max_prompt_tokens, seed=seed, shuffle=self.shuffle,
            shard_index=shard, shard_count=shards,
        )  # fmt: skip

    def held_out_prompts(self) -> list[Prompt]:
        """All held-out rows, in order."""
        return [self._prompt(self.held_out, i) for i in range(len(self.held_out))]

    def check_prompts(self) -> int:
        """Tokens of the longest prompt, of the rows there is time for.

        Raises ConfigError naming it where it does not fit.
        """
        most = 0
        for source in (self.held_out, self.train):
            prompts = [self._prompt(source, i, limit=sys.maxsize) for i in self._some(source)]
            longest = max(prompts, key=lambda p: len(p.tokens))
            self._prompt(source, longest.id)
            most = max(most, len(longest.tokens))
        return most

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
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    _check_its_own(cfg, tokenizer)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    template = Template(
        cfg.data.template, cfg.data.system, cfg.data.reasoning_effort,
        load_chat_template(cfg.init.tokenizer),
    )  # fmt: skip
    overlong = None
    if cfg.data.overlong_prompts == "drop":
        overlong = Overlong(
            lambda row: len(template.render(row, tokenizer)[1]), cfg.data.max_prompt_tokens
        )
    train, held_out = open_split(
        cfg.data.task, cfg.data.options,
        train_size=None if isinstance(cfg.data.train_rows, str) else cfg.data.train_rows,
        eval_size=cfg.data.held_out_rows, seed=cfg.seed,
        answers=not cfg.data.rewards.strip(), overlong=overlong, shuffle=cfg.data.shuffle,
    )  # fmt: skip
    rewards = read_rewards(cfg.data.rewards, _columns(train, held_out))
    limit_s = cfg.data.reward_timeout_s
    run_rewards = RewardProcess(limit_s) if rewards and limit_s else run_here
    r = cfg.rollout
    sampling = Sampling(
        max_new_tokens=r.max_new_tokens, stop_ids=tuple(tokenizer.stop_ids),
        temperature=r.temperature, top_k=r.top_k, top_p=r.top_p,
    )  # fmt: skip
    return Task(
        tokenizer, train, held_out, template, cfg.data.max_prompt_tokens, sampling, rewards,
        overlong, run_rewards, cfg.steps, cfg.data.shuffle,
    )  # fmt: skip


def contents(cfg: Config, task: Task) -> dict[str, str]:
    """Digests of what the files of a run hold, by the key of the config that names them, and of the
    code of its functions."""
    found = {"init.tokenizer": tokenizer_digest(cfg.init.tokenizer, cfg.init.checkpoint)}
    found |= source_digests(cfg)
    if task.template.chat is not None and task.template.text in (AUTO, CHAT):
        found["init.tokenizer (its chat template)"] = task.template.chat.digest
    sources = {"data.task": task.train, "data.options.held_out": task.held_out}
    for key, source in sources.items():
        named = key == "data.task" or "held_out" in cfg.data.options
        if named and isinstance(source, Subset) and isinstance(source.source, FileSource):
            found[key] = source.source.digest
    folder = Path(cfg.init.checkpoint)
    if cfg.init.checkpoint and folder.is_dir():  # a run that goes on can do without
        found["init.checkpoint"] = weights_digest(folder)
    return found


def _columns(*sources: Source) -> list[str]:
    """Names that the first rows of each source have, those at most that are looked at."""
    return list(dict.fromkeys(
        name for source in sources for i in range(min(len(source), LOOK_ROWS))
        for name in source[i].columns
    ))  # fmt: skip


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
    opening = answer_opening(prompt.tokens, task.tokenizer)
    answer = task.tokenizer.encode(prompt.answer)
    return [*opening, *answer, task.tokenizer.stop_ids[0]]


def response_text(rollout: Rollout, task: Task) -> str:
    """What the policy said, without its stop token."""
    return task.tokenizer.decode(_said(rollout))


def _said(rollout: Rollout) -> list[int]:
    cut = 1 if rollout.stop is StopReason.STOP_TOKEN else 0
    return rollout.tokens[: len(rollout.tokens) - cut].tolist()


def score(
    rollouts: Sequence[Rollout], source: Source, task: Task, tell: Tell = silent, *, step: int = 0
) -> Rewarded:
    """What each rollout's answer is worth: by `data.rewards`, or by the source, 0 to 1.

    step: of the run, for functions that ask for it.

    Where the prompt asks for channels, the final one is the answer; the source gives 0 without
    one, and functions are shown an empty text.
    Raises: ConfigError for a value that is no finite number.
    """
    spoken = [
        read_response(r.prompt.tokens, said, task.tokenizer, stop=r.tokens[len(said) :].tolist())
        for r, said in ((r, _said(r)) for r in rollouts)
    ]
    numbers = [r.prompt.id for r in rollouts]
    if task.rewards:
        made = score_samples(task.rewards, [
            Sample(n, source[n], said, r.tokens.tolist())
            for n, said, r in zip(numbers, spoken, rollouts, strict=True)
        ], tell, run=task.run_rewards,
            state=SimpleNamespace(global_step=step, max_steps=task.steps))  # fmt: skip
    else:
        own = [
            source.score(said.text, n) if said.final else 0.0
            for n, said in counted(list(zip(numbers, spoken, strict=True)), "scoring", tell)
        ]
        bad = [n for n, value in zip(numbers, own, strict=True) if not math.isfinite(value)]
        if bad:
            raise ConfigError(
                f"data.task must score with finite numbers; its scorer did not on row {bad[0]}. "
                "Mend the source's score()."
            )
        made = Rewarded(np.array(own, np.float32), [{} for _ in own])
    for mine, said in zip(made.parts, spoken, strict=True):
        if said.channels:
            mine["reward/no_final_frac"] = float(not said.final)
    return made


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    task: Task,
    *,
    version: int,
    samples: int = 2,
    tell: Tell = silent,
) -> tuple[Metrics, list[Rollout], np.ndarray]:
    """Exact-match accuracy and pass@k on held-out prompts, sampled as in training and greedy.

    eval/accuracy is the mean reward of `samples` answers a prompt at the training temperature,
    which is what RL raises; eval/accuracy_greedy takes the most likely token each time;
    eval/pass@k is `pass_at_k` for k of 2, 4, 8, … and `samples`. Also returns the greedy rollouts
    and their rewards. The same seed every time. The parts of
    `data.rewards` are those of the sampled answers; an answer that all leave out counts not.
    Raises EngineError where an answer is not by weights `version`, ConfigError where no answer
    has a reward.
    """
    greedy = replace(task.sampling, temperature=0.0, top_k=0, top_p=1.0)
    tell("answering the held-out rows")
    rollouts = engine.generate(prompts, greedy, seed=0)
    rewards = score(rollouts, task.held_out, task, tell, step=version).rewards
    tell("answering the held-out rows")
    sampled = engine.generate(prompts, task.sampling, seed=1, samples=samples)
    check_order(rollouts, prompts, samples=1)
    check_order(sampled, prompts, samples=samples)
    check_versions([*rollouts, *sampled], newest=version, max_staleness=0)
    scores = score(sampled, task.held_out, task, tell, step=version)
    parts = {f"eval/{name}": value for name, value in part_metrics(scores.parts).items()}
    metrics = {
        "eval/accuracy": _mean(scores.rewards, task), "eval/accuracy_greedy": _mean(rewards, task)
    }  # fmt: skip
    metrics |= by_source([r.prompt.id for r in sampled], scores.rewards, task.held_out)
    by_prompt_PR = scores.rewards.reshape(-1, samples)
    powers = [2**i for i in range(1, samples.bit_length())]
    metrics |= {
        f"eval/pass@{k}": pass_at_k(by_prompt_PR, k)
        for k in dict.fromkeys([*powers, samples]) if k > 1
    }  # fmt: skip
    return metrics | parts, rollouts, rewards


def by_source(numbers: Sequence[int], rewards: np.ndarray, source: Source) -> Metrics:
    """eval/accuracy/NAME of each value of the column data_source, where rows have two or more."""
    names = [source[n].columns.get("data_source") for n in numbers]
    known = [name if isinstance(name, str) else "" for name in names]
    if len(set(known) - {""}) < 2:
        return {}
    return {
        f"eval/accuracy/{name}": float(np.mean(mine))
        for name in sorted(set(known) - {""})
        if len(mine := [x for x, k in zip(rewards, known, strict=True) if k == name and x == x])
    }


def pass_at_k(rewards_PR: np.ndarray, k: int) -> float:
    """The best reward of k answers, expected over all k of each prompt's R, averaged over prompts.

    Σ_i r_(i)·C(i−1, k−1) / C(n, k) over the sorted rewards of a prompt's n answers that have one:
    1 − C(n−c, k)/C(n, k) where c of them have 1 and the others 0. Prompts with n < k count not;
    NaN without any other.
    Source: Chen et al. 2021, arXiv:2107.03374, equation 1; verl's best@k for other rewards.
    """
    values = []
    for rewards_R in rewards_PR:
        known = np.sort(rewards_R[~np.isnan(rewards_R)]).astype(float)
        n = len(known)
        if n >= k:
            # exact integers, divided once: binomials of large n leave float64's range
            shares = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
            values.append(float(known @ shares))
    return float(np.mean(values)) if values else math.nan


def _mean(rewards: np.ndarray, task: Task) -> float:
    return float(scored(rewards, task).mean())


def scored(rewards: np.ndarray, task: Task) -> np.ndarray:
    """Those that there are. Raises ConfigError where every function left every sample out."""
    known = rewards[~np.isnan(rewards)]
    if not known.size:
        raise ConfigError(
            f"data.rewards must score some answers; {', '.join(r.name for r in task.rewards)} "
            f"returned None for all {len(rewards)}, or took too long. Try other rows, or add a "
            "function for these."
        )
    return known
