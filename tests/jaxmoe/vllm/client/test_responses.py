# SPDX-License-Identifier: Apache-2.0
"""Nothing malformed passes: each way an answer can be wrong is named."""

import base64
import copy
import io
import math

import numpy as np
import pytest
from vllm_cases import CFG

from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.request import _join_completions
from jaxmoe.vllm.client.responses import (
    ExpectedResponse,
    parse_completions,
    parse_prompt_logps,
    read_npy,
)

EXPECTED = ExpectedResponse(prompt_tokens=3, samples=2, max_tokens=4, stop_ids=frozenset({9}))


@pytest.mark.parametrize("shape", [(), (0, 2), (5,), (3, 4, 2)])
@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">i4", "float32"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_array_is_read_as_numpy_wrote_it(shape, dtype, order, version):
    array = np.asarray(np.arange(math.prod(shape)).reshape(shape), dtype, order=order)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    read = read_npy(file.getvalue())
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize(
    "raw", [b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x04\x00{'a'", b"abc" * 9]
)
def test_what_is_no_array_is_said(raw):
    with pytest.raises(ValueError):
        read_npy(raw)
    complete = io.BytesIO()
    np.save(complete, np.arange(9))
    with pytest.raises(ValueError):
        read_npy(complete.getvalue()[:-1])


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def choice(index, tokens, finish):
    rows = np.random.default_rng(index).permuted(
        np.tile(np.arange(6), (2 * (len(tokens) + 2), 1)), axis=1
    )
    experts = rows[:, :2].reshape(-1, 2, 2)  # distinct, of each token and layer
    return {
        "index": index,
        "token_ids": tokens,
        "finish_reason": finish,
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5 - t} for t in tokens]},
        "weight_versions": [
            {"version": "r:1", "start": 0, "end": 1},
            {"version": "r:2", "start": 1, "end": len(tokens)},
        ],
        "routed_experts": npy(experts.astype(np.uint8)),
    }


GOOD = {"choices": [choice(1, [5, 9], "stop"), choice(0, [5, 6, 7, 8], "length")]}


def spoilt(change):
    answer = copy.deepcopy(GOOD)
    change(answer["choices"][1], answer)
    return answer


def test_answers_are_in_the_order_of_samples():
    first, second = parse_completions(GOOD, EXPECTED, CFG)
    assert first.tokens == [5, 6, 7, 8] and second.tokens == [5, 9]
    assert first.logp == [-5.5, -6.5, -7.5, -8.5]
    assert first.labels == ["r:1", "r:2", "r:2", "r:2"] and second.finish == "stop"
    assert first.experts is not None and first.experts.shape == (6, 2, 2)


def put(**fields):
    return lambda c, answer: c.update(fields)


def put_logp(value):
    return lambda c, answer: c["logprobs"]["content"][2].update(logprob=value)


INVALID = {
    "fewer choices": (lambda c, a: a["choices"].pop(), "asked for 2 samples of a prompt, got 1"),
    "more choices": (lambda c, a: a["choices"].append(c), "asked for 2 samples .* got 3"),
    "no choices": (lambda c, a: a.update(choices=None), "must have a list of choices"),
    "one twice": (lambda c, a: c.update(index=1), "must be numbered 0 to 1"),
    "no tokens": (put(token_ids=[]), "1 to 4 tokens, got 0"),
    "tokens as text": (put(token_ids=["5", "6", "7", "8"]), "whole numbers"),
    "a token outside": (put(token_ids=[5, 6, 7, 97]), r"below 97, got \[97\]"),
    "a negative token": (put(token_ids=[5, 6, 7, -1]), "below 97"),
    "too many tokens": (put(token_ids=[1] * 5), "1 to 4 tokens, got 5"),
    "a token less": (put(token_ids=[5, 6, 7]), "length after 3 of 4 tokens"),
    "another token": (put(token_ids=[5, 6, 8, 8]), "log-prob 2 must be of token 8"),
    "no log-probs": (put(logprobs=None), "4 tokens must have as many log-probs, got 0"),
    "no number": (put_logp(None), "log-prob 2 must be a finite number"),
    "nan": (put_logp(math.nan), "finite"),
    "above zero": (put_logp(0.1), "must be a log-prob"),
    "vLLM's stand-in for none": (put_logp(-9999.0), "must be a log-prob"),
    "a stop inside": (
        lambda c, a: (
            c.update(token_ids=[5, 9, 7, 8]),
            c["logprobs"]["content"][1].update(token_id=9),
        ),
        "finish_reason is length, but a stop token is at 1",
    ),
    "stopped at no stop token": (put(finish_reason="stop"), r"stop tokens are at \[\]"),
    "another reason": (put(finish_reason="error"), "must be stop, length or abort, got 'error'"),
    "no versions": (put(weight_versions=None), "weight_versions must cover 4 tokens"),
    "a gap": (put(weight_versions=[{"version": "r:1", "start": 1, "end": 4}]), "without gaps"),
    "versions too short": (
        put(weight_versions=[{"version": "r:1", "start": 0, "end": 3}]),
        "cover 4 tokens",
    ),
    "versions too long": (
        put(weight_versions=[{"version": "r:1", "start": 0, "end": 9}]),
        "cover 4 tokens",
    ),
    "experts cut": (put(routed_experts=npy(np.zeros((5, 2, 2), np.uint8))), r"shape \(6, 2, 2\)"),
    "experts of numbers": (put(routed_experts=npy(np.zeros((6, 2, 2)))), "whole numbers"),
    "an expert outside": (
        put(routed_experts=npy(np.full((6, 2, 2), 6, np.uint8))),
        "from 0 to 5.* got 6",
    ),
    "experts torn": (put(routed_experts="abc"), "base64 of an .npy"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_wrong_is_refused_by_name(name):
    change, message = INVALID[name]
    with pytest.raises(RequestFailed, match=message):
        parse_completions(spoilt(change), EXPECTED, CFG)


@pytest.mark.parametrize("answer", [None, [], "text", {}, {"choices": [1, 2]}])
def test_no_answer_at_all_is_refused(answer):
    with pytest.raises(RequestFailed, match="list of choices"):
        parse_completions(answer, EXPECTED, CFG)


@pytest.mark.parametrize("rows", ["zeros", "marked"])
def test_tokens_without_known_experts_have_minus_one(rows):
    """All zeros is what some fused kernels record, for a cached prompt say; -1 is vLLM's mark."""
    experts = parse_completions(GOOD, EXPECTED, CFG)[0].experts.copy()
    experts[:3] = 0 if rows == "zeros" else -1
    parsed = parse_completions(spoilt(put(routed_experts=npy(experts))), EXPECTED, CFG)[0].experts
    assert (parsed[:3] == -1).all() and np.array_equal(parsed[3:], experts[3:])


def test_an_aborted_answer_may_be_short_or_empty():
    aborted = spoilt(put(finish_reason="abort", token_ids=[], logprobs=None, weight_versions=None))
    assert parse_completions(aborted, EXPECTED, CFG)[0].tokens == []


def test_a_rounded_positive_log_prob_becomes_zero():
    assert parse_completions(spoilt(put_logp(3e-7)), EXPECTED, CFG)[0].logp[2] == 0.0


def test_continued_samples_join_log_probs_labels_and_experts():
    complete = parse_completions(GOOD, EXPECTED, CFG)[0]
    expected = ExpectedResponse(3, 1, 4, frozenset())
    head = copy.deepcopy(GOOD["choices"][1]) | {"finish_reason": "abort"}
    for key in ("token_ids",):
        head[key] = head[key][:2]
    head["logprobs"]["content"] = head["logprobs"]["content"][:2]
    head["weight_versions"][1]["end"] = 2
    head["routed_experts"] = npy(complete.experts[:4].astype(np.uint8))
    (first,) = parse_completions({"choices": [head]}, expected, CFG)
    continuation = choice(0, [7, 8], "length")
    continuation["weight_versions"] = [{"version": "r:3", "start": 0, "end": 2}]
    continuation["routed_experts"] = npy(np.tile(np.uint8([5, 3]), (3 + 2 + 2 - 1, 2, 1)))
    (second,) = parse_completions(
        {"choices": [continuation]}, ExpectedResponse(5, 1, 2, frozenset()), CFG
    )
    parsed = _join_completions(first, second, prompt=3)
    assert parsed.tokens == [5, 6, 7, 8] and parsed.finish == "length"
    assert parsed.labels == ["r:1", "r:2", "r:3", "r:3"]
    assert parsed.experts is not None and np.array_equal(parsed.experts[:4], complete.experts[:4])
    assert (parsed.experts[4:] == [5, 3]).all() and len(parsed.experts) == 6


def test_scores_must_be_of_every_given_token():
    rows = [None, {"4": {"logprob": -1.0}, "1": {"logprob": -0.1}}, {"7": {"logprob": -2.0}}]
    answer = {"prompt_logprobs": rows}
    assert parse_prompt_logps(answer, [3, 4, 7]).tolist() == [0.0, -1.0, -2.0]
    with pytest.raises(RequestFailed, match="must have token 8"):
        parse_prompt_logps(answer, [3, 4, 8])
    with pytest.raises(RequestFailed, match="must have 4 entries, got 3"):
        parse_prompt_logps(answer, [3, 4, 7, 7])
