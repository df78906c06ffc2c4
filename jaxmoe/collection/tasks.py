# SPDX-License-Identifier: Apache-2.0
"""Tasks: rows become prompts, and an environment, if there is one, replies to the answers.

Next: jaxmoe/collection/rollouts.py samples; jaxmoe/collection/scores.py scores.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmoe.checkpoint.same_run import weights_digest
from jaxmoe.collection.row_functions import read_demonstrations, read_row_map
from jaxmoe.collection.source_digests import source_digests
from jaxmoe.config import Config, ConfigError
from jaxmoe.data.chat_template import load_chat_template
from jaxmoe.data.file_split import SplitRequest
from jaxmoe.data.files import FileSource
from jaxmoe.data.harmony.parse import opens_message
from jaxmoe.data.overlong import PromptLengthFilter
from jaxmoe.data.pipeline import PromptIterator
from jaxmoe.data.pipeline import make_prompt as render_row
from jaxmoe.data.pipeline import stream_prompts as prompt_stream
from jaxmoe.data.rows import MappedRows, Message, Row, Source, Subset
from jaxmoe.data.sources import open_split
from jaxmoe.data.templates import AUTO, CHAT, Template
from jaxmoe.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer, tokenizer_digest
from jaxmoe.environments.environment import check_rows
from jaxmoe.environments.environment_specs import read_environment
from jaxmoe.environments.episodes import Episodes, EpisodeSettings, sample_rollouts
from jaxmoe.environments.tool_specs import read_tools
from jaxmoe.environments.tools import Tool
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rewards.reward_process import RewardProcess, Runner, call_limit_s, run_inline
from jaxmoe.rewards.reward_specs import check_before_run, find_check
from jaxmoe.rewards.rewards import (
    Reward,
    read_rewards,
)
from jaxmoe.rewards.sandbox_rewards import bind_sandbox
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.replies import ReplyThreads

MAX_COLUMN_ROWS = 16  # rows per source whose columns are available to reward functions
CHECK_ROWS_S = 2.0  # time to check rows before a run; some sources generate theirs slowly


@dataclass(frozen=True)
class Task:
    """A task's rows, the tokenizer, and how to sample answers to it."""

    tokenizer: Tokenizer
    train: Source
    held_out: Source
    template: Template
    max_prompt_tokens: int
    sampling: Sampling
    rewards: tuple[Reward, ...] = ()  # empty: the source scores
    overlong: PromptLengthFilter | None = None  # None: a prompt that is too long is an error
    run_rewards: Runner = run_inline  # calls the functions of data.rewards
    max_lost_frac: float = 0.5  # of the episodes of a batch, and of the answers without a reward
    steps: int = 0  # total steps of the run: trainer_state.max_steps of reward functions
    shuffle: bool = True  # reorder the training rows in each epoch
    episodes: EpisodeSettings | None = None  # None: single answers
    # The messages of an episode that a warm start imitates; None: it trains on stored answers.
    demonstrate: Callable[[Row], Sequence[Message]] | None = None
    swapped_share: float = 0.0  # of the answers: graded against another row too
    second_grader: tuple[Reward, ...] = ()  # never trained on
    second_grader_share: float = 0.0  # of the answers
    row_notes: tuple[str, ...] = ()  # why rows of the files are neither trained on nor held out
    run_second_grader: Runner = run_inline

    @property
    def score_name(self) -> str:
        """The name to show for eval/accuracy: a user's rewards may be negative, or sums past 1."""
        return "mean reward" if self.rewards else "accuracy"

    def describe_rows(self) -> list[str]:
        """The counts of rows, and a line for each reason to leave rows out."""
        counts = f"{len(self.train):,} to train on, {len(self.held_out):,} held out"
        return [counts, *self.row_notes, *([str(self.overlong)] if self.overlong else [])]

    def stream(self, count: int, seed: int) -> PromptIterator:
        """Endless shuffled lists of `count` training prompts; its state can be saved."""
        return prompt_stream(
            self.train,
            self.tokenizer,
            template=self.template,
            prompts_per_step=count,
            max_prompt_tokens=self.max_prompt_tokens,
            seed=seed,
            shuffle=self.shuffle,
        )

    def held_out_prompts(self) -> list[Prompt]:
        """All held-out rows, in order."""
        return [self.make_prompt(self.held_out, i) for i in range(len(self.held_out))]

    def check_prompts(self) -> int:
        """Tokens of the longest prompt among the rows that can be checked within CHECK_ROWS_S.

        Raises: ConfigError that names the row if its prompt is longer than max_prompt_tokens.
        """
        max_tokens = 0
        for source in (self.held_out, self.train):
            prompts = [
                self.make_prompt(source, i, limit=sys.maxsize) for i in self.rows_to_check(source)
            ]
            longest = max(prompts, key=lambda p: len(p.tokens))
            # The prompts above are made without a limit, so that the error is about the longest
            # one.
            self.make_prompt(source, longest.id)
            max_tokens = max(max_tokens, len(longest.tokens))
        return max_tokens

    def rows_to_check(self, source: Source) -> Iterator[int]:
        """Indices of rows to check: as many as are held out, then more until CHECK_ROWS_S."""
        deadline = time.monotonic() + CHECK_ROWS_S
        for row in range(len(source)):
            if row >= len(self.held_out) and time.monotonic() > deadline:
                return
            yield row

    def make_prompt(self, source: Source, row: int, limit: int | None = None) -> Prompt:
        limit = self.max_prompt_tokens if limit is None else limit
        return render_row(source, row, self.tokenizer, self.template, limit)

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        held_out: bool = False,
    ) -> list[Rollout]:
        """Return `samples` rollouts of each prompt of the training rows, or of the held-out ones.

        With an environment they are episodes; see `sample_rollouts`.
        """
        return sample_rollouts(
            engine,
            prompts,
            sampling,
            seed=seed,
            samples=samples,
            settings=self.episodes,
            source=self.held_out if held_out else self.train,
            template=self.template,
            tokenizer=self.tokenizer,
            max_prompt_tokens=self.max_prompt_tokens,
        )


def open_task(cfg: Config) -> Task:
    """The task of a config. Raises ConfigError for data that cannot be trained on."""
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    _check_tokenizer_choice(cfg, tokenizer)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    tools = read_tools(cfg.data.tools, cfg.sandbox)
    template = Template(
        cfg.data.template,
        cfg.data.system,
        cfg.data.reasoning_effort,
        load_chat_template(cfg.init.tokenizer),
        tuple(tool.description for tool in tools),
        cfg.data.keep_analysis,
    )
    # An environment, or reward functions, need no answer in the row.
    pays_itself = bool(cfg.data.environment.strip())
    answers = not (pays_itself or cfg.data.rewards.strip())
    map_row = read_row_map(
        cfg.data.map_rows, cfg.seed, keeps_answers=answers, columns=cfg.data.columns
    )
    overlong = None
    if cfg.data.overlong_prompts == "drop":
        overlong = PromptLengthFilter(
            lambda row: len(template.render(map_row(row) if map_row else row, tokenizer)[1]),
            cfg.data.max_prompt_tokens,
        )
    train, held_out, notes = open_split(
        cfg.data.task,
        cfg.data.options,
        SplitRequest(
            None if isinstance(cfg.data.train_rows, str) else cfg.data.train_rows,
            cfg.data.held_out_rows,
            cfg.seed,
            cfg.data.distinct,
            has_environment=pays_itself,
            overlong=overlong,
            shuffle=cfg.data.shuffle,
        ),
        answers=answers,
        columns=cfg.data.columns,
    )
    if map_row is not None:
        train, held_out = MappedRows(train, map_row), MappedRows(held_out, map_row)
    columns, limit_s = _list_columns(train, held_out), cfg.data.reward_timeout_s
    rewards = bind_sandbox(read_rewards(cfg.data.rewards, columns), cfg.sandbox)
    second_grader = bind_sandbox(
        read_rewards(cfg.data.second_grader, columns, "data.second_grader"), cfg.sandbox
    )
    _check_call_limits((*rewards, *second_grader), limit_s)
    r = cfg.rollout
    sampling = Sampling(
        max_new_tokens=r.max_new_tokens,
        stop_ids=tuple(tokenizer.stop_ids),
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        max_turns=r.max_turns,
        max_turn_tokens=r.max_turn_tokens,
        max_context=r.max_context,
        max_episode=r.max_episode_tokens,
    )
    task = Task(
        tokenizer,
        train,
        held_out,
        template,
        cfg.data.max_prompt_tokens,
        sampling,
        rewards,
        overlong,
        max_lost_frac=r.max_lost_frac,
        steps=cfg.steps,
        shuffle=cfg.data.shuffle,
        episodes=_open_episodes(cfg, tools),
        run_rewards=RewardProcess(limit_s) if rewards and limit_s else run_inline,
        demonstrate=read_demonstrations(cfg.warmup.demonstrations),
        swapped_share=cfg.data.swapped_share,
        second_grader=second_grader,
        second_grader_share=cfg.data.second_grader_share,
        row_notes=notes,
        # A process of its own, so that a grader that hangs delays nothing else.
        run_second_grader=RewardProcess(limit_s) if second_grader and limit_s else run_inline,
    )
    check_rewards(task)
    check_episode_start(task)
    return task


def _check_call_limits(rewards: Sequence[Reward], timeout_s: float) -> None:
    for reward in rewards:
        if math.isfinite(call_limit_s(reward.function)) and not timeout_s:
            raise ConfigError(
                f"{reward.label} must run in a process that can be killed, because some answers "
                "would take for ever; got data.reward_timeout_s=0. "
                "Try --set data.reward_timeout_s=300."
            )


def _open_episodes(cfg: Config, tools: Sequence[Tool]) -> EpisodeSettings | None:
    """The environment of a config, or None."""
    if not cfg.has_environment:
        return None
    r = cfg.rollout
    return EpisodeSettings(
        read_environment(cfg.data.environment, tools=tools, system=cfg.data.system),
        ReplyThreads(r.reply_threads),
        r.reply_timeout_s,
        r.patience_s,
        r.max_reply_tokens,
        earns=bool(cfg.data.environment.strip()),
        allows_contexts=r.max_episode_tokens > 0,
    )


def check_rewards(task: Task) -> None:
    """Call the checks of reward functions on the rows that are checked before a run.

    Raises: ConfigError for what a function could not score.
    """
    rewards = [r for r in (*task.rewards, *task.second_grader) if find_check(r.function)]
    if rewards:
        rows = [
            source[i] for source in (task.train, task.held_out) for i in task.rows_to_check(source)
        ]
        for reward in rewards:
            check_before_run(reward.function, rows)


def check_episode_start(task: Task) -> None:
    """Begin one episode, so that what cannot work is refused before a run.

    Raises: ConfigError if the environment does not find what it needs in a row, if its prompt does
    not fit, or if the prompt does not end where a turn of harmony begins.
    """
    if task.episodes is None:
        return
    rows = [source[0] for source in (task.train, task.held_out)]
    check_rows(task.episodes.make_environment, rows)
    prompt = _open_one_episode(task)
    if not opens_message(prompt.tokens, task.tokenizer):
        raise ConfigError(
            "data.environment and data.tools need prompts in harmony format, which end in "
            f"<|start|>assistant; with data.template={task.template.text!r:.60} they end in "
            f"{prompt.text[-20:]!r}. Try --set data.template=harmony."
        )


def _open_one_episode(task: Task) -> Prompt:
    """The prompt of an episode of the first row whose reset works, among the first three."""
    settings, fault = task.episodes, ""
    assert settings is not None
    for row in range(min(3, len(task.train))):
        prompt = task.make_prompt(task.train, row, limit=sys.maxsize)
        episodes = Episodes(settings, task.train, task.template, task.tokenizer, samples=1, seed=0)
        try:
            (prompt,) = episodes.open_prompts([prompt], task.max_prompt_tokens)
            if not episodes.reset_faults:
                return prompt
            fault = fault or f"{episodes.reset_faults[0]}, on {task.train[row].location or row}"
        finally:
            episodes.abandon()
    raise ConfigError(
        f"data.environment must begin an episode on one of the first three rows; {fault}. "
        "Correct its reset()."
    )


def digest_contents(cfg: Config, task: Task) -> dict[str, str]:
    """Digests of the contents of a run's files and of its functions' source, by config key."""
    digests = {"init.tokenizer": tokenizer_digest(cfg.init.tokenizer, cfg.init.checkpoint)}
    digests |= source_digests(cfg)
    if task.template.chat is not None and task.template.text in (AUTO, CHAT):
        digests["init.tokenizer (its chat template)"] = task.template.chat.digest
    sources = {"data.task": task.train, "data.options.held_out": task.held_out}
    for key, source in sources.items():
        # Only rows of files can change between two starts. A procedural task is a function of its
        # options.
        is_configured = key == "data.task" or "held_out" in cfg.data.options
        source = source.source if isinstance(source, MappedRows) else source
        if is_configured and isinstance(source, Subset) and isinstance(source.source, FileSource):
            digests[key] = source.source.digest
    folder = Path(cfg.init.checkpoint)
    # A resumed run does not need the folder, and it may be gone.
    if cfg.init.checkpoint and folder.is_dir():
        digests["init.checkpoint"] = weights_digest(folder)
    return digests


def _list_columns(*sources: Source) -> list[str]:
    """Names of the columns in the first MAX_COLUMN_ROWS rows of each source."""
    return list(
        dict.fromkeys(
            name
            for source in sources
            for i in range(min(len(source), MAX_COLUMN_ROWS))
            for name in source[i].columns
        )
    )


def _check_tokenizer_choice(cfg: Config, tokenizer: Tokenizer) -> None:
    """Refuse the default "bytes" if the checkpoint has a tokenizer with other ids."""
    folder = Path(cfg.init.checkpoint)
    has_tokenizer = cfg.init.checkpoint and (folder / "tokenizer.json").is_file()
    if cfg.init.tokenizer != "bytes" or not has_tokenizer:
        return
    sample = "What is 27 + 15?"
    if load_tokenizer(str(folder)).encode(sample) != tokenizer.encode(sample):
        raise ConfigError(
            f"init.tokenizer must be the tokenizer of init.checkpoint, got 'bytes'. "
            f"Try --set init.tokenizer={folder}."
        )
