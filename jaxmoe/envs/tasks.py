# SPDX-License-Identifier: Apache-2.0
"""Single-turn tasks: rows become prompts, answers become rewards.

Next: jaxmoe/train.py reads the prompts and scores the engine's answers.
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
from jaxmoe.data.harmony import ParsedResponse, answer_prefix, read_response
from jaxmoe.data.overlong import PromptLengthFilter
from jaxmoe.data.pipeline import PromptIterator, make_prompt
from jaxmoe.data.pipeline import stream_prompts as prompt_stream
from jaxmoe.data.rows import Source, Subset
from jaxmoe.data.sources import open_split
from jaxmoe.data.templates import AUTO, CHAT, Template
from jaxmoe.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer, tokenizer_digest
from jaxmoe.envs.conventions import Sample
from jaxmoe.envs.reward_process import RewardProcess, Runner, run_inline
from jaxmoe.envs.rewards import (
    BatchRewards,
    ReportProgress,
    Reward,
    ignore_progress,
    iterate_with_progress,
    mean_part_metrics,
    read_rewards,
    score_samples,
)
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from jaxmoe.rl.batch import supervised_batch
from jaxmoe.rl.source_digests import source_digests
from jaxmoe.rollout.check_rollouts import check_masks, check_order
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.staleness import check_versions
from jaxmoe.shapes import Metrics

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
    steps: int = 0  # total steps of the run: trainer_state.max_steps of reward functions
    shuffle: bool = True  # reorder the training rows in each epoch

    @property
    def score_name(self) -> str:
        """The name to show for eval/accuracy: a user's rewards may be negative, or sums past 1."""
        return "mean reward" if self.rewards else "accuracy"

    def stream(self, count: int, seed: int) -> PromptIterator:
        """Endless shuffled lists of `count` training prompts; its state can be saved."""
        return prompt_stream(
            self.train, self.tokenizer, template=self.template, prompts_per_step=count,
            max_prompt_tokens=self.max_prompt_tokens, seed=seed, shuffle=self.shuffle,
        )  # fmt: skip

    def held_out_prompts(self) -> list[Prompt]:
        """All held-out rows, in order."""
        return [self._make_prompt(self.held_out, i) for i in range(len(self.held_out))]

    def check_prompts(self) -> int:
        """Tokens of the longest prompt among the rows that can be checked within CHECK_ROWS_S.

        Raises: ConfigError that names the row if its prompt is longer than max_prompt_tokens.
        """
        max_tokens = 0
        for source in (self.held_out, self.train):
            prompts = [
                self._make_prompt(source, i, limit=sys.maxsize) for i in self._rows_to_check(source)
            ]
            longest = max(prompts, key=lambda p: len(p.tokens))
            # The prompts above are made without a limit, so that the error is about the longest
            # one.
            self._make_prompt(source, longest.id)
            max_tokens = max(max_tokens, len(longest.tokens))
        return max_tokens

    def check_answers(self, length: int) -> None:
        """Check that a warm start can train on the stored answers, for the same rows.

        Raises: ConfigError if an answer is missing or a row has more than `length` tokens.
        """
        prompts = [self._make_prompt(self.train, i) for i in self._rows_to_check(self.train)]
        pairs = [(prompt, answer_tokens(prompt, self)) for prompt in prompts]
        prompt, answer = max(pairs, key=lambda pair: len(pair[0].tokens) + len(pair[1]))
        supervised_batch([prompt], [answer], length=length, pad_id=self.tokenizer.pad_id)

    def _rows_to_check(self, source: Source) -> Iterator[int]:
        """Indices of rows to check: as many as are held out, then more until CHECK_ROWS_S."""
        deadline = time.monotonic() + CHECK_ROWS_S
        for row in range(len(source)):
            if row >= len(self.held_out) and time.monotonic() > deadline:
                return
            yield row

    def _make_prompt(self, source: Source, row: int, limit: int | None = None) -> Prompt:
        limit = self.max_prompt_tokens if limit is None else limit
        return make_prompt(source, row, self.tokenizer, self.template, limit)


def open_task(cfg: Config) -> Task:
    """The task of a config. Raises ConfigError for data that cannot be trained on."""
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    _check_tokenizer_choice(cfg, tokenizer)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    template = Template(
        cfg.data.template, cfg.data.system, cfg.data.reasoning_effort,
        load_chat_template(cfg.init.tokenizer),
    )  # fmt: skip
    overlong = None
    if cfg.data.overlong_prompts == "drop":
        overlong = PromptLengthFilter(
            lambda row: len(template.render(row, tokenizer)[1]), cfg.data.max_prompt_tokens
        )
    train, held_out = open_split(
        cfg.data.task, cfg.data.options,
        train_size=None if isinstance(cfg.data.train_rows, str) else cfg.data.train_rows,
        eval_size=cfg.data.held_out_rows, seed=cfg.seed,
        answers=not cfg.data.rewards.strip(), overlong=overlong, shuffle=cfg.data.shuffle,
    )  # fmt: skip
    rewards = read_rewards(cfg.data.rewards, _list_columns(train, held_out))
    limit_s = cfg.data.reward_timeout_s
    run_rewards = RewardProcess(limit_s) if rewards and limit_s else run_inline
    r = cfg.rollout
    sampling = Sampling(
        max_new_tokens=r.max_new_tokens, stop_ids=tuple(tokenizer.stop_ids),
        temperature=r.temperature, top_k=r.top_k, top_p=r.top_p,
    )  # fmt: skip
    return Task(
        tokenizer, train, held_out, template, cfg.data.max_prompt_tokens, sampling, rewards,
        overlong, run_rewards, cfg.steps, cfg.data.shuffle,
    )  # fmt: skip


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
        if is_configured and isinstance(source, Subset) and isinstance(source.source, FileSource):
            digests[key] = source.source.digest
    folder = Path(cfg.init.checkpoint)
    # A resumed run does not need the folder, and it may be gone.
    if cfg.init.checkpoint and folder.is_dir():
        digests["init.checkpoint"] = weights_digest(folder)
    return digests


def _list_columns(*sources: Source) -> list[str]:
    """Names of the columns in the first MAX_COLUMN_ROWS rows of each source."""
    return list(dict.fromkeys(
        name for source in sources for i in range(min(len(source), MAX_COLUMN_ROWS))
        for name in source[i].columns
    ))  # fmt: skip


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


def answer_tokens(prompt: Prompt, task: Task) -> list[int]:
    """The stored answer and the stop token, as a warm start trains on them."""
    if prompt.answer is None:
        raise ConfigError(
            f"a warm start needs stored answers, and row {prompt.id} has none. "
            "Try --set warmup.steps=0."
        )
    opening = answer_prefix(prompt.tokens, task.tokenizer)
    answer = task.tokenizer.encode(prompt.answer)
    return [*opening, *answer, task.tokenizer.stop_ids[0]]


def response_text(rollout: Rollout, task: Task) -> str:
    """The text of a response without its stop token; of an episode, that of the last turn."""
    return task.tokenizer.decode(_answer_ids(rollout, task))


def _answer_ids(rollout: Rollout, task: Task) -> list[int]:
    # A turn that the environment did not continue also ends in a stop token.
    ends_turn = rollout.stop is StopReason.STOP_TOKEN or (
        rollout.stop is not StopReason.MAX_TOKENS
        and int(rollout.tokens[-1]) in task.sampling.stop_ids
    )
    return rollout.tokens[_answer_start(rollout) : len(rollout.tokens) - ends_turn].tolist()


def _answer_start(rollout: Rollout) -> int:
    """Index of the first token of the policy's last turn."""
    return rollout.turns[-1][0] if rollout.policy_mask is not None else 0


def _parse_answer(rollout: Rollout, task: Task) -> ParsedResponse:
    """Parse the last turn of the policy, behind everything before it."""
    ids, start = _answer_ids(rollout, task), _answer_start(rollout)
    before = [*rollout.prompt.tokens, *rollout.tokens[:start].tolist()]
    stop = rollout.tokens[start + len(ids) :].tolist()
    return read_response(before, ids, task.tokenizer, stop=stop)


def score_rollouts(
    rollouts: Sequence[Rollout],
    source: Source,
    task: Task,
    report: ReportProgress = ignore_progress,
    *,
    step: int = 0,
) -> BatchRewards:
    """Reward of each rollout, by `data.rewards`, else by the source (0 to 1).

    step: the step of the run: trainer_state.global_step of reward functions.

    The answer of an episode is the last turn of the policy.
    If the prompt uses channels, the final one is the answer. Without a final channel, the source
    gives 0, and reward functions receive an empty text.
    Raises: ConfigError for a value that is not a finite number.
    """
    responses = [_parse_answer(r, task) for r in rollouts]
    numbers = [r.prompt.id for r in rollouts]
    if task.rewards:
        scores = score_samples(task.rewards, [
            Sample(n, source[n], parsed, r.tokens.tolist())
            for n, parsed, r in zip(numbers, responses, rollouts, strict=True)
        ], report, run=task.run_rewards,
            state=SimpleNamespace(global_step=step, max_steps=task.steps))  # fmt: skip
    else:
        values = [
            source.score(parsed.text, n) if parsed.has_final else 0.0
            for n, parsed in iterate_with_progress(
                list(zip(numbers, responses, strict=True)), "scoring", report
            )
        ]
        bad = [n for n, value in zip(numbers, values, strict=True) if not math.isfinite(value)]
        if bad:
            raise ConfigError(
                f"data.task must score with finite numbers; its scorer did not on row {bad[0]}. "
                "Correct the source's score()."
            )
        scores = BatchRewards(np.array(values, np.float32), [{} for _ in values])
    for metrics, parsed in zip(scores.parts, responses, strict=True):
        if parsed.uses_channels:
            metrics["reward/no_final_frac"] = float(not parsed.has_final)
    return scores


def evaluate_held_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    task: Task,
    *,
    version: int,
    samples: int = 2,
    report: ReportProgress = ignore_progress,
) -> tuple[Metrics, list[Rollout], np.ndarray]:
    """Accuracy and pass@k on held-out prompts, sampled as in training and greedy.

    eval/accuracy: mean reward of `samples` answers per prompt at the training temperature, which
        is the quantity that RL raises.
    eval/accuracy_greedy: mean reward of greedy answers.
    eval/pass@k: `pass_at_k` for k = 2, 4, 8, … and `samples`.
    Parts of `data.rewards` are means over the sampled answers. Answers without a reward are
    ignored. The seed is always the same.

    Returns: (metrics, greedy rollouts, their rewards).
    Raises: EngineError if an answer was not generated by weights `version`; ConfigError if no
        answer has a reward.
    """
    greedy = replace(task.sampling, temperature=0.0, top_k=0, top_p=1.0)
    report("answering the held-out rows")
    rollouts = engine.generate(prompts, greedy, seed=0)
    rewards = score_rollouts(rollouts, task.held_out, task, report, step=version).rewards
    report("answering the held-out rows")
    # With the same seed at each evaluation, the weights alone make the difference between two of
    # them.
    sampled = engine.generate(prompts, task.sampling, seed=1, samples=samples)
    check_order(rollouts, prompts, samples=1)
    check_order(sampled, prompts, samples=samples)
    check_masks([*rollouts, *sampled])
    check_versions([*rollouts, *sampled], newest=version, max_staleness=0)
    scores = score_rollouts(sampled, task.held_out, task, report, step=version)
    parts = {f"eval/{name}": value for name, value in mean_part_metrics(scores.parts).items()}
    metrics = {
        "eval/accuracy": _mean_reward(scores.rewards, task),
        "eval/accuracy_greedy": _mean_reward(rewards, task),
    }
    metrics |= accuracy_by_source([r.prompt.id for r in sampled], scores.rewards, task.held_out)
    by_prompt_PR = scores.rewards.reshape(-1, samples)
    powers = [2**i for i in range(1, samples.bit_length())]
    metrics |= {
        f"eval/pass@{k}": pass_at_k(by_prompt_PR, k)
        for k in dict.fromkeys([*powers, samples]) if k > 1
    }  # fmt: skip
    return metrics | parts, rollouts, rewards


def accuracy_by_source(numbers: Sequence[int], rewards: np.ndarray, source: Source) -> Metrics:
    """eval/accuracy/NAME for each value of the column data_source, if there are at least two."""
    names = [source[n].columns.get("data_source") for n in numbers]
    source_names = [name if isinstance(name, str) else "" for name in names]
    if len(set(source_names) - {""}) < 2:
        return {}
    return {
        f"eval/accuracy/{name}": float(np.mean(source_rewards))
        for name in sorted(set(source_names) - {""})
        if len(
            source_rewards := [
                x for x, k in zip(rewards, source_names, strict=True) if k == name and x == x
            ]
        )
    }


def pass_at_k(rewards_PR: np.ndarray, k: int) -> float:
    """Expected best reward of k answers drawn from each prompt's R, averaged over prompts.

    Σ_i r_(i)·C(i−1, k−1) / C(n, k) over the sorted rewards of a prompt's n answers that have a
    reward. With c rewards of 1 and the others 0, this is 1 − C(n−c, k)/C(n, k). Prompts with
    n < k are ignored; NaN if no prompt remains.
    Source: Chen et al. 2021, arXiv:2107.03374, equation 1; verl's best@k for other rewards.
    """
    values = []
    for rewards_R in rewards_PR:
        sorted_rewards = np.sort(rewards_R[~np.isnan(rewards_R)]).astype(float)
        n = len(sorted_rewards)
        if n >= k:
            # Exact integers, divided once: binomials of large n exceed the range of float64.
            shares = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
            values.append(float(sorted_rewards @ shares))
    return float(np.mean(values)) if values else math.nan


def _mean_reward(rewards: np.ndarray, task: Task) -> float:
    return float(select_scored(rewards, task).mean())


def select_scored(rewards: np.ndarray, task: Task) -> np.ndarray:
    """The rewards that are not NaN. Raises ConfigError if there are none."""
    scored_rewards = rewards[~np.isnan(rewards)]
    if not scored_rewards.size:
        raise ConfigError(
            f"data.rewards must score some answers; {', '.join(r.name for r in task.rewards)} "
            f"returned None for all {len(rewards)} answers, or timed out. Try other rows, or add "
            "a function for these."
        )
    return scored_rewards
