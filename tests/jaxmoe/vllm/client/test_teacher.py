# SPDX-License-Identifier: Apache-2.0
"""A teacher behind a URL: what it must answer before a run, and what is not trained on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.batches.batch import Batch
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.config_file import load_config, override
from jaxmoe.vllm.client.teacher import TeacherServer, open_teacher_server
from tests.jaxmoe.commands import TINIEST, arguments, lines, train_here
from tests.jaxmoe.vllm.teacher_server import FAULTS, MODEL, completion, formula, run_teacher

CFG = load_config("tiny.py")
ENDS = np.array([7, 5, 6])


def config(url):
    settings = f"distill.teacher={url}", "distill.advantage_coef=1.0", "distill.timeout_s=1"
    return override(CFG, *settings)


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
