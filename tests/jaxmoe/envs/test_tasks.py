# SPDX-License-Identifier: Apache-2.0
"""Rows become prompts that fit, answers become rewards, and evaluation repeats itself."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.config import (
    Config,
    ConfigError,
    DataConfig,
    EngineError,
    InitConfig,
    OptimConfig,
    RolloutConfig,
)
from jaxmoe.data.tokenizer import write_byte_tokenizer
from jaxmoe.envs import tasks
from jaxmoe.envs.tasks import answer_tokens, evaluate, open_task, response_text, score
from jaxmoe.model.config import tiny
from jaxmoe.records import Prompt, Rollout, StopReason

HELD_OUT = 5
NEWEST = np.full(99, 3, np.int32)


def config(path, **data):
    fields = {"task": str(path), "train_rows": 9, "held_out_rows": HELD_OUT} | data
    return Config(
        model=tiny(),
        data=DataConfig(**{"max_prompt_tokens": 24, **fields}),
        rollout=RolloutConfig(sequences_per_step=4, samples_per_prompt=2, max_new_tokens=6),
        optim=OptimConfig(lr=1e-3),
        steps=1,
    )


def write(path, questions):
    lines = [f'{{"question": "{q}", "answer": "{i}"}}' for i, q in enumerate(questions)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def task(tmp_path):
    return open_task(config(write(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)])))


class Parrot:
    """An engine that says what it is told for each prompt, and notes how it was asked."""

    def __init__(self, tokenizer, says, version=3):
        self.tokenizer, self.says, self.version, self.asked = tokenizer, says, version, []

    incidents = ()

    def load(self, params, version):
        raise AssertionError("an evaluation samples from the weights it is given")

    def close(self):
        raise AssertionError("the engine is its opener's to close")

    def generate(self, prompts, sampling, *, seed, samples=1):
        self.asked.append((sampling.temperature, samples, seed))
        rollouts = []
        for prompt in prompts:
            for sample in range(samples):
                ids = [*self.tokenizer.encode(self.says(prompt, sample)), sampling.stop_ids[0]]
                tokens = np.array(ids, np.int32)
                zeros = np.zeros(len(ids), np.float32)
                versions = np.full(len(ids), self.version, np.int32)
                rollouts.append(Rollout(prompt, tokens, zeros, StopReason.STOP_TOKEN, versions))
        return rollouts


def test_the_stored_answer_and_its_stop_token_earn_the_whole_reward(task):
    prompts = task.held_out_prompts()
    assert len(prompts) == HELD_OUT
    rollouts = []
    for prompt in prompts:
        tokens = np.array(answer_tokens(prompt, task), np.int32)
        assert tokens[-1] in task.sampling.stop_ids
        zeros = np.zeros(len(tokens), np.float32)
        rollouts.append(
            Rollout(prompt, tokens, zeros, StopReason.STOP_TOKEN, NEWEST[: len(tokens)])
        )
        assert response_text(rollouts[-1], task) == prompt.answer
    assert score(rollouts, task.held_out, task).tolist() == [1.0] * HELD_OUT
    wrong = [replace(r, tokens=rollouts[0].tokens) for r in rollouts[1:]]
    assert score(wrong, task.held_out, task).tolist() == [0.0] * (HELD_OUT - 1)


def test_an_answer_cut_short_keeps_its_last_token(task):
    tokens = np.array(task.tokenizer.encode("12"), np.int32)
    prompt = task.held_out_prompts()[0]
    cut = Rollout(prompt, tokens, np.zeros(2, np.float32), StopReason.MAX_TOKENS, NEWEST[:2])
    assert response_text(cut, task) == "12"


def test_accuracy_is_of_samples_and_of_the_greedy_answer(task):
    def says(prompt: Prompt, sample: int) -> str:
        right = prompt.answer or ""
        return right if sample == 0 else "banana"

    engine = Parrot(task.tokenizer, says)
    prompts = task.held_out_prompts()
    metrics, rollouts, rewards = evaluate(engine, prompts, task, version=3, samples=4)
    assert metrics == {"eval/accuracy": 0.25, "eval/accuracy_greedy": 1.0}
    assert len(rollouts) == HELD_OUT and rewards.tolist() == [1.0] * HELD_OUT
    assert {(t, n) for t, n, _ in engine.asked} == {(0.0, 1), (1.0, 4)}
    first = list(engine.asked)
    evaluate(engine, task.held_out_prompts(), task, version=3, samples=4)
    assert engine.asked[len(first) :] == first  # the same seeds every time


def test_answers_by_other_weights_than_the_ones_scored_are_refused(task):
    engine = Parrot(task.tokenizer, lambda prompt, sample: "banana", version=2)
    with pytest.raises(EngineError, match="must be drawn by version 3 of the weights"):
        evaluate(engine, task.held_out_prompts(), task, version=3)


def test_the_longest_prompt_that_does_not_fit_is_named_at_once(tmp_path):
    questions = ["short"] + ["x" * (20 + i) for i in range(13)]
    path = write(tmp_path / "q.jsonl", questions)
    task = open_task(config(path, held_out_rows=7, train_rows=7))
    with pytest.raises(ConfigError, match=r"Try --set data.max_prompt_tokens=32"):
        task.check_prompts()
    open_task(config(path, held_out_rows=7, train_rows=7, max_prompt_tokens=32)).check_prompts()


def test_the_longest_stored_answer_that_does_not_fit_is_named_at_once(tmp_path):
    rows = [{"question": chr(96 + i), "answer": i * "y"} for i in range(1, 15)]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = open_task(config(path, held_out_rows=2, train_rows=12))
    prompt = len(task.held_out_prompts()[0].tokens)
    longest = 1 + max(len(task.train[i].answer) for i in range(12))  # and the stop token
    advice = rf"got {prompt} \+ {longest}\. Try --set rollout.max_new_tokens={longest}\."
    with pytest.raises(ConfigError, match=advice):
        task.check_answers(prompt + longest - 1)
    task.check_answers(prompt + longest)


def test_of_slow_sources_as_many_rows_are_looked_at_as_are_held_out(task, monkeypatch):
    monkeypatch.setattr(tasks, "LOOK_S", -1.0)
    assert list(task._some(task.train)) == list(range(HELD_OUT)) and len(task.train) > HELD_OUT
    monkeypatch.setattr(tasks, "LOOK_S", 60.0)
    assert list(task._some(task.train)) == list(range(len(task.train)))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)])
    cfg = config(path)
    small = Config(**{**vars(cfg), "model": tiny(vocab_size=200)})
    with pytest.raises(ConfigError, match="vocab_size"):
        open_task(small)


def test_a_checkpoints_own_tokenizer_is_not_forgotten(tmp_path):
    path = write(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)])
    cfg = replace(config(path), init=InitConfig(checkpoint=str(tmp_path / "model")))
    file = write_byte_tokenizer(tmp_path / "model")
    open_task(cfg)  # the same ids
    ours = json.loads(file.read_text())
    vocab = ours["model"]["vocab"]
    vocab["W"], vocab["h"] = vocab["h"], vocab["W"]
    file.write_text(json.dumps(ours))
    with pytest.raises(ConfigError, match="Try --set init.tokenizer=.*/model"):
        open_task(cfg)
    open_task(replace(cfg, init=replace(cfg.init, tokenizer=str(tmp_path / "model"))))


def test_a_warm_start_without_stored_answers_is_refused(task):
    prompt = Prompt(3, "q", (1, 2), None)
    with pytest.raises(ConfigError, match="--set warmup.steps=0"):
        answer_tokens(prompt, task)
