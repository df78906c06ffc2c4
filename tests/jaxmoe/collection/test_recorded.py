# SPDX-License-Identifier: Apache-2.0
"""What is kept of a step: the right tokens with their gaps, other rows each time, and a bound."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scripted import CFG

from jaxmoe.collection.evaluation import pass_at_k
from jaxmoe.collection.recorded import (
    MAX_CHARS,
    MAX_TEXTS,
    MAX_TOKENS,
    N_PROMPTS,
    group_rows,
    held_out_rows,
    rotate_rows,
    truncate_text,
)
from jaxmoe.collection.tasks import open_task
from jaxmoe.records import Prompt, Rollout, StopReason

TASK = open_task(CFG)  # its tokens are bytes
LENGTH = 24


def make_rollout(row, text, stop=StopReason.STOP_TOKEN):
    ids = TASK.tokenizer.encode(text) + [258] * (stop is StopReason.STOP_TOKEN)
    prompt = Prompt(row, "ask", tuple(TASK.tokenizer.encode("ask")), "yes")
    tokens = np.array(ids, np.int32)
    return Rollout(prompt, tokens, np.full(len(ids), -1.0), stop, np.zeros(len(ids), np.int32))


def make_group_rows(texts, samples, rewards):
    rollouts = [make_rollout(i // samples, text) for i, text in enumerate(texts)]
    shape = (len(rollouts), LENGTH)
    mask_BT = np.zeros(shape, bool)
    for i, rollout in enumerate(rollouts):
        mask_BT[i, 3 : 3 + len(rollout.tokens)] = True
    logp_BT = np.where(mask_BT, -1.0 + 0.01 * np.arange(LENGTH), 99.0)
    return group_rows(
        rollouts,
        np.array(rewards, np.float32),
        TASK,
        samples=samples,
        mask_BT=mask_BT,
        advantages_BT=np.where(mask_BT, np.arange(len(rollouts))[:, None] - 1.5, 99.0),
        logp_BT=logp_BT,
        rollout_logp_BT=np.where(mask_BT, -1.0, 77.0),
    )


def test_each_token_of_an_answer_stands_with_its_own_gap():
    (row,) = make_group_rows(["hé", "no"], 2, [1.0, np.nan])
    first, second = row["samples"]
    # byte 2 of é is the farther one: tokens 3 to 6 of the row have gaps of 0.03 to 0.06
    assert first["tokens"] == [
        ["h", 0.03, 0.3679],
        ["é", 0.05, 0.1353],
        ["<|return|>", 0.06, 0.3679],
    ]
    assert (first["gap_mean"], first["gap_max"], first["length"]) == (0.045, 0.06, 4)
    assert (first["reward"], first["advantage"]) == (1.0, -1.5)
    assert (second["reward"], second["advantage"], second["response"]) == (None, -0.5, "no")
    assert (row["kind"], row["prompt"], row["answer"]) == ("group", "ask", "yes")


def test_the_first_and_the_last_group_are_kept():
    rows = make_group_rows(list("abcdef"), 2, np.arange(6.0))
    assert [row["row"] for row in rows] == [0, 2]
    assert [s["response"] for row in rows for s in row["samples"]] == ["a", "b", "e", "f"]


def test_a_samples_line_has_a_bound():
    long = "é" * 50_000
    rollouts = [make_rollout(0, long, StopReason.MAX_TOKENS)] * 64
    shape = (64, 3 + len(rollouts[0].tokens))
    zeros, mask_BT = np.zeros(shape), np.ones(shape, bool)
    (row,) = group_rows(
        rollouts,
        np.zeros(64),
        TASK,
        samples=64,
        mask_BT=mask_BT,
        advantages_BT=zeros,
        logp_BT=zeros,
        rollout_logp_BT=zeros,
    )
    assert len(row["samples"][0]["tokens"]) <= MAX_TOKENS and len(json.dumps(row)) < 700_000
    assert row["samples"][0]["stop"] == "max_tokens" and row["samples"][0]["length"] == 100_000


def test_a_cut_text_keeps_both_its_ends():
    text = "a" + "x" * MAX_CHARS + "z"
    assert (
        truncate_text(text).startswith("ax")
        and truncate_text(text).endswith("xz")
        and "[…2 characters…]" in truncate_text(text)
    )
    assert truncate_text(text[1:-1]) == text[1:-1]


def test_held_out_rows_take_turns_until_all_were_shown():
    assert {i for number in range(4) for i in rotate_rows(4 * N_PROMPTS - 3, number)} == set(
        range(4 * N_PROMPTS - 3)
    )
    assert rotate_rows(3, 7) == [2, 0, 1]
    rollouts = [make_rollout(i, str(i)) for i in range(20)]
    rows = [[r["row"] for r in held_out_rows(rollouts, np.zeros(20), TASK, n)] for n in (0, 1)]
    assert rows == [list(range(8)), list(range(8, 16))]


@pytest.mark.paper
@pytest.mark.parametrize("c, n, k", [(0, 5, 2), (1, 5, 2), (3, 5, 2), (5, 5, 5), (2, 200, 100)])
def test_pass_at_k_is_chens_estimator(c, n, k):
    """Chen et al. 2021, arXiv:2107.03374, their numpy script's product form."""
    product = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    rewards_PR = np.array([[1.0] * c + [0.0] * (n - c)])
    np.testing.assert_allclose(pass_at_k(rewards_PR, k), product, rtol=1e-12)


def test_pass_at_k_of_other_rewards_is_the_best_of_k_and_leaves_out_what_has_none():
    # pairs of (0.2, 0.5, 1): best 0.5, 1, 1
    rewards_PR = np.array([[0.2, 1.0, 0.5, np.nan], [np.nan, np.nan, np.nan, 1.0]])
    np.testing.assert_allclose(pass_at_k(rewards_PR, 2), 2.5 / 3)
    assert np.isnan(pass_at_k(rewards_PR, 4))


def make_episode(turns, replies, stop=StopReason.MAX_TURNS):
    """The policy's texts and those of the environment between them."""
    parts = [
        [(True, turns[0])],
        *([(False, b), (True, a)] for a, b in zip(turns[1:], replies, strict=True)),
    ]
    ids = [(p, t) for part in parts for p, text in part for t in TASK.tokenizer.encode(text)]
    tokens = np.array([t for _, t in ids], np.int32)
    mask = np.array([p for p, _ in ids])
    prompt = Prompt(0, "ask", tuple(TASK.tokenizer.encode("ask")), "yes")
    return Rollout(
        prompt,
        tokens,
        np.full(len(ids), -1.0),
        stop,
        np.zeros(len(ids), np.int32),
        policy_mask=mask,
    )


def test_an_episode_is_recorded_by_turns_and_its_gaps_are_the_policy_s():
    paid = np.array([0.0, 0.25, 0.0, 0.0, 0.0, 0.5])  # of the reward 1; the rest is at the end
    episode = replace(make_episode(["ab", "c"], ["xyz"]), token_rewards=paid)
    shape = (1, LENGTH)
    mask_BT = np.zeros(shape, bool)
    mask_BT[0, 3:9] = episode.sampled_mask
    (row,) = group_rows(
        [episode],
        np.ones(1),
        TASK,
        samples=1,
        mask_BT=mask_BT,
        advantages_BT=np.where(mask_BT, 0.5, 0.0),
        logp_BT=np.where(mask_BT, -0.99, 99.0),
        rollout_logp_BT=np.where(mask_BT, -1.0, 0.0),
    )
    (sample,) = row["samples"]
    assert (sample["gap_mean"], sample["gap_max"], sample["advantage"]) == (0.01, 0.01, 0.5)
    assert (sample["length"], sample["env_length"], sample["turns"]) == (3, 3, 2)
    assert (sample["reward"], sample["turn_rewards"]) == (1.0, [0.25, 0.75])
    assert sample["response"] == "c" and sample["stop"] == "max_turns"
    assert [t[0] for t in sample["tokens"]] == ["a", "b", "xyz", "c"]
    assert [len(t) for t in sample["tokens"]] == [3, 3, 1, 3]
    # This prompt opens no message in harmony format, so that there are only raw texts.
    assert sample["transcript"] == [
        ["policy", "", "ab"],
        ["environment", "", "xyz"],
        ["policy", "", "c"],
    ]


@pytest.mark.slow
def test_a_long_episode_has_a_bound():
    episode = make_episode(["a" * 900] * 200, ["b" * 900] * 199)
    (row,) = held_out_rows([episode], np.zeros(1), TASK, 0)
    assert len(row["transcript"]) == MAX_TEXTS + 1 and row["turns"] == 200
    assert len(json.dumps(row)) < 5 * MAX_CHARS
