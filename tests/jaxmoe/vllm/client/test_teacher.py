# SPDX-License-Identifier: Apache-2.0
"""A teacher behind a URL: what it must answer before a run, and what is not trained on."""

import json
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmoe.batches.batch import Batch
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.config_file import load_config, override
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.losses.distillation import NO_WORD
from jaxmoe.model import forward, plain_ops
from jaxmoe.model.layers import head_logits
from jaxmoe.vllm.client.teacher import TeacherServer, open_teacher_server
from tests.jaxmoe import teacher_folder
from tests.jaxmoe.commands import TINIEST, arguments, lines, train_here
from tests.jaxmoe.vllm.teacher_server import (
    FAULTS,
    LIST_FAULTS,
    MODEL,
    completion,
    formula,
    list_completion,
    lists,
    run_teacher,
)

CFG = load_config("tiny.py")
ENDS = np.array([7, 5, 6])


TOP_K = 4


def config(url, top_k=0):
    settings = f"distill.teacher={url}", "distill.advantage_coef=1.0", "distill.timeout_s=1"
    lists = ("distill.reverse_kl_coef=1.0", f"distill.top_k={top_k}") if top_k else ()
    return override(CFG, *settings, *lists)


def make_rows():
    """Three rows; the last has no token to train on."""
    columns = np.arange(7)[None]
    is_token = columns < ENDS[:, None]
    tokens = np.where(is_token, np.arange(21).reshape(3, 7) + 60, 0).astype(np.int32)
    mask = is_token & (columns >= 2)
    mask[2] = False
    return Batch(
        tokens_BT=tokens,
        positions_BT=np.broadcast_to(columns.astype(np.int32), tokens.shape),
        segment_ids_BT=is_token.astype(np.int32),
        loss_mask_BT=mask,
        rollout_logp_BT=np.zeros(tokens.shape, np.float32),
        rewards_B=np.zeros(3, np.float32),
    )


def test_log_probs_are_of_the_batchs_tokens():
    batch = make_rows()
    with run_teacher() as url:
        scored, metrics = open_teacher_server(config(url)).score_batch(batch)
    want = np.zeros(batch.tokens_BT.shape)
    for b in (0, 1):
        want[b, : ENDS[b]] = formula(batch.tokens_BT[b, : ENDS[b]].tolist())
    np.testing.assert_allclose(
        scored.teacher_logp_BT, np.where(batch.loss_mask_BT, want, 0), rtol=1e-6
    )
    np.testing.assert_array_equal(scored.loss_mask_BT, batch.loss_mask_BT)
    assert metrics == {"distill/lost_rows": 0.0} and scored.teacher_logp_BT.dtype == np.float32


def test_lists_are_of_the_trained_tokens():
    batch = make_rows()
    with run_teacher(list_completion, top_k=TOP_K) as url:
        scored, metrics = open_teacher_server(config(url, TOP_K)).score_batch(batch)
    mask, ids, logp = batch.loss_mask_BT, scored.teacher_top_ids_BTK, scored.teacher_top_logp_BTK
    assert metrics == {"distill/lost_rows": 0.0}
    assert ids.shape == logp.shape == (*mask.shape, TOP_K)
    assert (ids[~mask] == -1).all() and (logp[~mask] == np.float32(NO_WORD)).all()
    for b in (0, 1):
        tokens = batch.tokens_BT[b, : ENDS[b]].tolist()
        is_trained, (want_ids, want_logps) = mask[b, : ENDS[b]], lists(tokens, TOP_K)
        np.testing.assert_array_equal(ids[b][mask[b]], np.array(want_ids)[is_trained])
        np.testing.assert_allclose(logp[b][mask[b]], np.array(want_logps)[is_trained], rtol=1e-6)
        # Of a prompt's token among the likeliest the log-prob is that of the list.
        own = scored.teacher_logp_BT[b][mask[b]][::2]
        np.testing.assert_allclose(own, -0.7, rtol=1e-6)


@pytest.mark.parametrize("fault", LIST_FAULTS)
def test_a_lying_list_is_not_trained_on(fault):
    faulty, message = LIST_FAULTS[fault]
    batch = make_rows()

    def answer(tokens, top_k):
        first = tokens[0] == batch.tokens_BT[0, 0]
        return (faulty if first else list_completion)(tokens, top_k)

    with run_teacher(answer, top_k=TOP_K) as url:
        server = TeacherServer(url, 1.0, MODEL, TOP_K, 258)
        scored, metrics = server.score_batch(batch)
        with closing(server.open_client(1.0)) as client:
            with pytest.raises(RequestFailed, match=message) as failure:
                server.score_tokens(client, batch.tokens_BT[0].tolist())
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 400
    assert metrics == {"distill/lost_rows": 1.0} and not scored.loss_mask_BT[0].any()
    assert (scored.teacher_top_ids_BTK[0] == -1).all() and scored.loss_mask_BT[1].any()


def test_a_server_of_shorter_lists_is_refused():
    with run_teacher(lambda tokens, top_k: 400, top_k=TOP_K) as url:
        with pytest.raises(ConfigError, match=f"vllm serve MODEL --max-logprobs {TOP_K}$"):
            open_teacher_server(config(url, TOP_K))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_is_refused_before_a_run(fault):
    answer, message = FAULTS[fault]
    with run_teacher(answer) as url, pytest.raises(ConfigError, match=message) as refusal:
        open_teacher_server(config(url))
    assert "\n" not in str(refusal.value) and "distill.teacher=" in str(refusal.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_row_is_not_trained_on(fault):
    faulty, _ = FAULTS[fault]
    batch = make_rows()
    first = int(batch.tokens_BT[0, 0])

    def answer(tokens):
        return faulty(tokens) if tokens[0] == first else completion(tokens)

    with run_teacher(answer) as url:
        scored, metrics = TeacherServer(url, 1.0, MODEL).score_batch(batch)
    assert metrics == {"distill/lost_rows": 1.0}
    assert not scored.loss_mask_BT[0].any() and not scored.teacher_logp_BT[0].any()
    np.testing.assert_array_equal(scored.loss_mask_BT[1:], batch.loss_mask_BT[1:])
    assert np.isfinite(scored.teacher_logp_BT).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_without_any_row_ends_the_run(fault):
    faulty, message = FAULTS[fault]
    with run_teacher(faulty) as url, pytest.raises(EngineError, match=message) as stop:
        TeacherServer(url, 1.0, MODEL).score_batch(make_rows())
    assert "Nothing was trained on" in str(stop.value) and "\n" not in str(stop.value)


def test_a_row_that_fails_once_is_asked_again():
    calls = []

    def answer(tokens):
        calls.append(tuple(tokens))
        return 500 if calls.count(tuple(tokens)) == 1 else completion(tokens)

    with run_teacher(answer) as url:
        _, metrics = TeacherServer(url, 5.0, MODEL).score_batch(make_rows())
    assert metrics == {"distill/lost_rows": 0.0} and len(calls) == 4


def test_a_server_that_is_down_is_refused():
    with run_teacher() as url:
        pass
    with pytest.raises(ConfigError, match="must be a vLLM that returns log-probs"):
        open_teacher_server(config(url))
    with pytest.raises(EngineError, match="of the 2 of this step none"):
        TeacherServer(url, 1.0, MODEL).score_batch(make_rows())


def test_another_tokenizer_or_context_is_refused():
    with run_teacher(tokenize=lambda text: [1, 2, 3]) as url:
        with pytest.raises(ConfigError, match="must have the policy's tokenizer"):
            open_teacher_server(config(url))
    with run_teacher(context=CFG.context) as url:
        with pytest.raises(ConfigError, match=f"--max-model-len {CFG.context + 1}"):
            open_teacher_server(config(url))


def test_a_resumed_run_may_have_another_url():
    one, two = (TeacherServer(f"http://{host}", 1.0, MODEL) for host in ("a", "b"))
    assert one.digest() == two.digest() != replace(one, model="another").digest()


@pytest.mark.slow  # a run
def test_a_run_trains_without_its_lost_rows(tmp_path):
    unlucky = []

    def answer(tokens):
        # The first sequence of the step, which is longer than the text of the start.
        if len(tokens) > 20 and not unlucky:
            unlucky.append(tokens)
        return 500 if tokens in unlucky else completion(tokens)

    with run_teacher(answer) as url:
        words = arguments(
            tmp_path, *TINIEST, f"distill.teacher={url}", "distill.advantage_coef=0.5", "steps=1"
        )
        assert train_here(words) == 0
    (row,) = [row for row in lines(tmp_path) if row["stage"] == "rl" and row["step"] == 1]
    assert row["distill/lost_rows"] >= 1 and np.isfinite(row["distill/reverse_kl"])
    assert json.loads((tmp_path / "config.json").read_text())["config"]["distill"]["teacher"] == url


def score_by(params, model, length):
    """The answer of a vLLM that serves these weights, as it lists words."""

    @jax.jit
    def log_softmax(tokens_T):
        hidden_BTD, *_ = forward(params, tokens_T[None], model, plain_ops())
        logits_TV = head_logits(hidden_BTD[0], params["head"])[:, : model.vocab_size]
        return jax.nn.log_softmax(logits_TV)

    def answer(tokens, top_k):
        padded = np.pad(np.array(tokens, np.int32), (0, length - len(tokens)))
        rows = [None]
        for token, logp_V in zip(tokens[1:], np.asarray(log_softmax(padded)), strict=False):
            order = np.argsort(-logp_V, kind="stable")
            ranked = [(int(v), k) for k, v in enumerate(order, 1) if k <= top_k or v == token]
            rows.append({str(v): {"logprob": float(logp_V[v]), "rank": k} for v, k in ranked})
        return {"model": MODEL, "choices": [{"index": 0, "prompt_logprobs": rows}]}

    return answer


@pytest.mark.slow  # two runs
def test_lists_of_all_words_teach_as_weights_do(tmp_path):
    weights = ("distill.advantage_coef=0.5", "distill.reverse_kl_coef=0.3", "optim.lr=0.01")
    settings = *TINIEST, *weights, "distill.forward_kl_coef=0.2", "steps=2"
    words, runs = teacher_folder.MODEL.vocab_size - 1, {}
    answer = score_by(teacher_folder.draw_weights(), teacher_folder.MODEL, CFG.context)
    with run_teacher(answer, top_k=words) as url:
        folder = teacher_folder.write_teacher(tmp_path / "teacher")
        for name, teacher in (("served", (url, words)), ("read", (folder, 0))):
            typed = [f"distill.{n}={x}" for n, x in zip(("teacher", "top_k"), teacher, strict=True)]
            assert train_here(arguments(tmp_path / name, *settings, *typed)) == 0
            rows = lines(tmp_path / name)
            runs[name] = [row for row in rows if row["stage"] == "rl" and "loss" in row]
    assert len(runs["read"]) == 2
    for served, read in zip(runs["served"], runs["read"], strict=True):
        assert served.pop("distill/lost_rows") == 0.0 and served.keys() == read.keys()
        assert read["distill/reverse_kl"] > 0.01 and read["distill/forward_kl"] > 0.01
        for name, value in read.items():
            if isinstance(value, float):
                np.testing.assert_allclose(served[name], value, 1e-4, 1e-4, err_msg=name)
