# SPDX-License-Identifier: Apache-2.0
"""Rows become prompts that fit, answers become rewards, and evaluation repeats itself."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.collection import tasks
from jaxmoe.collection.demonstrations import answer_tokens, check_targets
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.scores import response_text, score_rollouts
from jaxmoe.collection.tasks import digest_contents, open_task
from jaxmoe.config import (
    Config,
    ConfigError,
    DataConfig,
    EngineError,
    InitConfig,
    OptimConfig,
    RolloutConfig,
)
from jaxmoe.config_file import load_config
from jaxmoe.data.harmony.parse import read_response
from jaxmoe.data.rows import Row
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import ByteTokenizer, tokenizer_digest, write_byte_tokenizer
from jaxmoe.model.config import tiny
from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rewards.rewards import mean_part_metrics

N_HELD_OUT = 5
NEWEST = np.full(99, 3, np.int32)


def make_config(path, **data):
    fields = {"task": str(path), "train_rows": 9, "held_out_rows": N_HELD_OUT} | data
    return Config(
        model=tiny(),
        data=DataConfig(**{"max_prompt_tokens": 24, **fields}),
        rollout=RolloutConfig(sequences_per_step=4, samples_per_prompt=2, max_new_tokens=6),
        optim=OptimConfig(lr=1e-3),
        steps=1,
    )


def write_questions(path, questions):
    lines = [f'{{"question": "{q}", "answer": "{i}"}}' for i, q in enumerate(questions)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def task(tmp_path):
    return open_task(
        make_config(write_questions(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)]))
    )


class Parrot:
    """An engine that says what it is told for each prompt, and notes how it was asked."""

    def __init__(self, tokenizer, answer_fn, version=3):
        self.tokenizer, self.answer_fn, self.version, self.requests = (
            tokenizer,
            answer_fn,
            version,
            [],
        )

    incidents = ()

    def load(self, params, version):
        raise AssertionError("an evaluation samples from the weights it is given")

    def close(self):
        raise AssertionError("the engine is its opener's to close")

    def generate(self, prompts, sampling, *, seed, samples=1, environment=None):
        self.requests.append((sampling.temperature, samples, seed))
        rollouts = []
        for prompt in prompts:
            for sample in range(samples):
                ids = [*self.tokenizer.encode(self.answer_fn(prompt, sample)), sampling.stop_ids[0]]
                tokens = np.array(ids, np.int32)
                zeros = np.zeros(len(ids), np.float32)
                versions = np.full(len(ids), self.version, np.int32)
                rollouts.append(Rollout(prompt, tokens, zeros, StopReason.STOP_TOKEN, versions))
        return rollouts


def test_stored_answers_with_stop_token_earn_full_reward(task):
    prompts = task.held_out_prompts()
    assert len(prompts) == N_HELD_OUT
    rollouts = []
    for prompt in prompts:
        tokens = np.array(answer_tokens(prompt, task), np.int32)
        assert tokens[-1] in task.sampling.stop_ids
        zeros = np.zeros(len(tokens), np.float32)
        rollouts.append(
            Rollout(prompt, tokens, zeros, StopReason.STOP_TOKEN, NEWEST[: len(tokens)])
        )
        assert response_text(rollouts[-1], task) == prompt.answer
    assert score_rollouts(rollouts, task.held_out, task).rewards.tolist() == [1.0] * N_HELD_OUT
    wrong_rollouts = [replace(r, tokens=rollouts[0].tokens) for r in rollouts[1:]]
    assert score_rollouts(wrong_rollouts, task.held_out, task).rewards.tolist() == [0.0] * (
        N_HELD_OUT - 1
    )


def test_an_answer_cut_short_keeps_its_last_token(task):
    tokens = np.array(task.tokenizer.encode("12"), np.int32)
    prompt = task.held_out_prompts()[0]
    cut = Rollout(prompt, tokens, np.zeros(2, np.float32), StopReason.MAX_TOKENS, NEWEST[:2])
    assert response_text(cut, task) == "12"


@pytest.mark.parametrize("stop", [StopReason.STOP_TOKEN, StopReason.MAX_TURNS])
def test_an_episodes_answer_is_its_last_turn(task, stop):
    prompt = task.held_out_prompts()[0]
    answer = answer_tokens(prompt, task)
    question, reply = [*task.tokenizer.encode("2*3"), answer[-1]], task.tokenizer.encode("6\n")
    tokens = np.array([*question, *reply, *answer], np.int32)
    mask = np.array([True] * len(question) + [False] * len(reply) + [True] * len(answer))
    zeros, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
    episode = Rollout(prompt, tokens, zeros, stop, versions, policy_mask=mask)
    assert response_text(episode, task) == prompt.answer
    assert score_rollouts([episode], task.held_out, task).rewards.tolist() == [1.0]


def test_accuracy_is_of_samples_and_of_greedy_answers(task):
    def answer(prompt: Prompt, sample: int) -> str:
        stored = prompt.answer or ""
        return stored if sample == 0 else "banana"

    engine = Parrot(task.tokenizer, answer)
    prompts = task.held_out_prompts()
    metrics, rollouts, rewards = evaluate_held_out(engine, prompts, task, version=3, samples=4)
    assert metrics == {
        "eval/accuracy": 0.25,
        "eval/accuracy_greedy": 1.0,
        "eval/pass@2": 0.5,
        "eval/pass@4": 1.0,
        "eval/reward/swapped": 0.0,
        "eval/reward/swapped_share": 0.25,
    }
    assert len(rollouts) == N_HELD_OUT and rewards.tolist() == [1.0] * N_HELD_OUT
    assert {(t, n) for t, n, _ in engine.requests} == {(0.0, 1), (1.0, 4)}
    first = list(engine.requests)
    evaluate_held_out(engine, task.held_out_prompts(), task, version=3, samples=4)
    assert engine.requests[len(first) :] == first  # the same seeds every time


def test_accuracy_is_reported_by_data_source(tmp_path):
    rows = [
        {"question": f"{i}", "answer": f"{i}", "data_source": "odd/x" if i % 2 else "even"}
        for i in range(14)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = open_task(make_config(tmp_path / "q.jsonl"))
    engine = Parrot(task.tokenizer, lambda p, i: p.answer if int(p.answer) % 2 else "no")
    metrics, *_ = evaluate_held_out(engine, task.held_out_prompts(), task, version=3)
    assert metrics["eval/accuracy/odd/x"] == 1.0 and metrics["eval/accuracy/even"] == 0.0
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(r | {"data_source": "x"}) for r in rows))
    task = open_task(make_config(tmp_path / "q.jsonl"))
    metrics, *_ = evaluate_held_out(engine, task.held_out_prompts(), task, version=3)
    assert not [name for name in metrics if name.startswith("eval/accuracy/")]


def test_answers_by_another_version_are_refused(task):
    engine = Parrot(task.tokenizer, lambda prompt, sample: "banana", version=2)
    with pytest.raises(EngineError, match="must be sampled by weight version 3"):
        evaluate_held_out(engine, task.held_out_prompts(), task, version=3)


def test_the_longest_prompt_over_the_limit_is_named(tmp_path):
    questions = ["short"] + ["x" * (20 + i) for i in range(13)]
    path = write_questions(tmp_path / "q.jsonl", questions)
    task = open_task(make_config(path, held_out_rows=7, train_rows=7))
    with pytest.raises(ConfigError, match=r"Try --set data.max_prompt_tokens=32"):
        task.check_prompts()
    open_task(
        make_config(path, held_out_rows=7, train_rows=7, max_prompt_tokens=32)
    ).check_prompts()


def test_rows_with_longer_prompts_are_dropped_and_counted(tmp_path):
    questions = [f"{i:02}" + "x" * (30 * (i % 4 == 0)) for i in range(16)]  # four of them too long
    path = write_questions(tmp_path / "q.jsonl", questions)
    with pytest.raises(ConfigError, match=r"--set data.overlong_prompts=drop in a new run"):
        open_task(make_config(path, train_rows=11)).check_prompts()
    task = open_task(make_config(path, train_rows=7, overlong_prompts="drop"))
    assert task.check_prompts() == 2 and len(task.overlong.dropped) == 4
    assert str(task.overlong) == "4 prompts longer than data.max_prompt_tokens (24) dropped"
    retained = [s[i].question for s in (task.train, task.held_out) for i in range(len(s))]
    assert sorted(retained) == [q for q in questions if len(q) == 2]
    with pytest.raises(ConfigError, match=r"fit into 12 usable rows .*; 4 prompts longer"):
        open_task(make_config(path, train_rows=11, overlong_prompts="drop"))
    with pytest.raises(ConfigError, match="must be one of refuse, drop; got 'skip'"):
        make_config(path, overlong_prompts="skip")


def test_procedural_tasks_replace_rows_that_are_too_long():
    words = {"options": {"min_word_len": 1, "max_word_len": 12}, "max_prompt_tokens": 54}
    task = open_task(
        make_config("reasoning_gym:spell_backward", train_rows=40, overlong_prompts="drop", **words)
    )
    questions = [task.train[i].question for i in range(40)]
    assert max(map(len, questions)) <= 54 and task.overlong.dropped
    assert task.check_prompts() <= 54
    assert all(len(prompt.tokens) <= 54 for prompt in task.held_out_prompts())
    same_task = open_task(
        make_config("reasoning_gym:spell_backward", train_rows=40, overlong_prompts="drop", **words)
    )
    assert questions == [same_task.train[i].question for i in range(40)]


def test_the_longest_answer_over_the_limit_is_named(tmp_path):
    rows = [{"question": chr(96 + i), "answer": i * "y"} for i in range(1, 15)]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = open_task(make_config(path, held_out_rows=2, train_rows=12))
    prompt = len(task.held_out_prompts()[0].tokens)
    longest = 1 + max(len(task.train[i].answer) for i in range(12))  # and the stop token
    advice = rf"got {prompt} \+ {longest}\. Try --set rollout.max_new_tokens={longest}\."
    with pytest.raises(ConfigError, match=advice):
        check_targets(task, prompt + longest - 1)
    check_targets(task, prompt + longest)


def test_slow_sources_check_only_the_first_rows(task, monkeypatch):
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", -1.0)
    assert (
        list(task.rows_to_check(task.train)) == list(range(N_HELD_OUT))
        and len(task.train) > N_HELD_OUT
    )
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 60.0)
    assert list(task.rows_to_check(task.train)) == list(range(len(task.train)))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    path = write_questions(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)])
    cfg = make_config(path)
    small = Config(**{**vars(cfg), "model": tiny(vocab_size=200)})
    with pytest.raises(ConfigError, match="vocab_size"):
        open_task(small)


def test_a_checkpoints_own_tokenizer_is_not_forgotten(tmp_path):
    path = write_questions(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)])
    cfg = replace(make_config(path), init=InitConfig(checkpoint=str(tmp_path / "model")))
    file = write_byte_tokenizer(tmp_path / "model")
    open_task(cfg)  # the same ids
    tokenizer_json = json.loads(file.read_text())
    vocab = tokenizer_json["model"]["vocab"]
    vocab["W"], vocab["h"] = vocab["h"], vocab["W"]
    file.write_text(json.dumps(tokenizer_json))
    with pytest.raises(ConfigError, match="Try --set init.tokenizer=.*/model"):
        open_task(cfg)
    open_task(replace(cfg, init=replace(cfg.init, tokenizer=str(tmp_path / "model"))))


def test_a_warm_start_without_stored_answers_is_refused(task):
    prompt = Prompt(3, "q", (1, 2), None)
    with pytest.raises(ConfigError, match="--set warmup.steps=0"):
        answer_tokens(prompt, task)


CHANNEL_PROMPT = "<|start|>user<|message|>{question}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


class Channels(Parrot):
    """Says special strings as special tokens."""

    def __init__(self, tokenizer, answer_fn):
        class Marked(type(tokenizer)):
            def encode(self, text, *, specials=True):
                return super().encode(text, specials=specials)

        super().__init__(Marked(), answer_fn)


@pytest.mark.parametrize("template", [CHANNEL_PROMPT, "harmony"])
def test_only_the_final_channel_is_scored(tmp_path, template):
    path = write_questions(tmp_path / "q.jsonl", [f"what is {i}?" for i in range(14)])
    task = open_task(make_config(path, template=template, max_prompt_tokens=400))

    def answer(prompt, sample):
        thought = f"<|channel|>analysis<|message|>#### {prompt.answer}<|end|><|start|>assistant"
        return [thought, thought + FINAL + "none", FINAL + f"#### {prompt.answer}", ""][sample]

    prompts = task.held_out_prompts()
    rollouts = Channels(task.tokenizer, answer).generate(prompts, task.sampling, seed=0, samples=4)
    scores = score_rollouts(rollouts, task.held_out, task)
    assert scores.rewards.tolist() == [0.0, 0.0, 1.0, 0.0] * N_HELD_OUT
    assert mean_part_metrics(scores.parts) == {"reward/no_final_frac": 0.5}
    for prompt in prompts:  # a warm start teaches what is scored
        ids = np.array(answer_tokens(prompt, task), np.int32)
        taught = Rollout(prompt, ids, np.zeros(len(ids), np.float32), StopReason.STOP_TOKEN, ids)
        assert score_rollouts([taught], task.held_out, task).rewards.tolist() == [1.0]


def test_functions_get_the_final_channel_and_the_thoughts(tmp_path, monkeypatch):
    (tmp_path / "shown.py").write_text(
        "seen = []\ndef f(prompt, response, row, analysis):\n"
        "    seen.append((response, analysis))\n    return len(response)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(14)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"template": "harmony", "max_prompt_tokens": 400, "rewards": "shown:f"}
    cfg = make_config(
        tmp_path / "q.jsonl", reward_timeout_s=0.0, **fields
    )  # here, where it is seen
    task = open_task(cfg)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    engine = Channels(task.tokenizer, lambda prompt, i: [thought, thought + FINAL + "4"][i])
    rollouts = engine.generate(task.held_out_prompts()[:1], task.sampling, seed=0, samples=2)
    assert score_rollouts(rollouts, task.held_out, task).rewards.tolist() == [0.0, 1.0]
    assert sys.modules["shown"].seen == [("", "hm"), ("4", "hm")]
    with pytest.raises(ConfigError, match="f requires|must have a column answer"):
        open_task(replace(cfg, data=replace(cfg.data, rewards="")))


def test_a_score_that_is_no_number_is_refused(task, monkeypatch):
    class Odd:
        def __len__(self):
            return 1

        def __getitem__(self, row):
            return Row("q", "a")

        def score(self, response, row):
            return float("nan")

    rollouts = Parrot(task.tokenizer, lambda *_: "a").generate(
        task.held_out_prompts()[:1], task.sampling, seed=0
    )
    with pytest.raises(ConfigError, match="data.task must score with finite numbers"):
        score_rollouts(rollouts, Odd(), task)


@pytest.mark.parametrize("name", ["gptoss20b.py", "gptoss120b.py", "gptoss20b_ppo.py"])
def test_the_large_configs_ask_for_a_final_channel(name):
    data = load_config(name).data
    template = Template(data.template, data.system, data.reasoning_effort)
    text, tokens = template.render(Row("2+2?", "4"), ByteTokenizer())
    assert text.endswith("<|start|>assistant") and "Reasoning: low" in text and "####" in text
    assert read_response(tokens, b"#### 4", ByteTokenizer()).has_final is False


def test_content_digests_do_not_depend_on_the_path(tmp_path):
    rows = [f"what is {i}?" for i in range(14)]
    (tmp_path / "moved").mkdir()
    paths = (
        write_questions(tmp_path / "q.jsonl", rows),
        write_questions(tmp_path / "moved" / "r.jsonl", rows),
    )
    edited = write_questions(tmp_path / "e.jsonl", [*rows[:-1], "what is 14?"])
    first, moved, edited_digests = (
        digest_contents(cfg, open_task(cfg)) for cfg in map(make_config, (*paths, edited))
    )
    assert first == moved and first["init.tokenizer"] == edited_digests["init.tokenizer"] == "bytes"
    assert first["data.task"] != edited_digests["data.task"]
    write_byte_tokenizer(tmp_path)
    assert tokenizer_digest(str(tmp_path)) != "bytes"


def test_an_environment_that_pays_needs_no_answers(tmp_path, monkeypatch):
    """TRL's data sets for environments have one prompt many times, and no answer."""
    (tmp_path / "my_game.py").write_text(
        "from jaxmoe.data.rows import prompt_messages\n"
        "class Game:\n"
        "    def reset(self, row, *, seed): return prompt_messages(row), {}\n"
        "    def step(self, messages): return [], 1.0, True, False, {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "play"}]}\n' * 14)
    cfg = make_config(path, environment="my_game:Game()", template="harmony", max_prompt_tokens=600)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_turns=2, max_context=700))
    task = open_task(cfg)
    assert len(task.train) == 9 and len(task.held_out) == N_HELD_OUT
    assert "the same rows are trained on and held out" in task.describe_rows()[1]
    with pytest.raises(ConfigError, match="must have a column answer"):
        open_task(make_config(path))
    prompts, one = task.held_out_prompts(), np.zeros(1)
    tokens, versions = one.astype(np.int32), one.astype(np.int32)
    lost, played = (
        Rollout(
            prompt,
            tokens,
            one.astype(np.float32),
            StopReason.STOP_TOKEN,
            versions,
            env_rewards={"env": 1.0},
            lost=lost,
        )
        for prompt, lost in zip(prompts, ("env_error", ""), strict=False)
    )
    rewards = score_rollouts([lost, played], task.held_out, task).rewards
    np.testing.assert_array_equal(rewards, np.float32([np.nan, 1.0]))
