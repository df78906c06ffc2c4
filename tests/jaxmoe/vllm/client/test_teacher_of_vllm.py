# SPDX-License-Identifier: Apache-2.0
"""A real vLLM as the teacher: its log-probs, runs that learn from it, and its death in one."""

import json
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
import tokenizers
from served_folder import serve_folder
from teacher_server import run_teacher

from jaxmoe import export
from jaxmoe.batches.batch import rollout_batch
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.config_file import load_config, override, resolve
from jaxmoe.data.tokenizer import write_byte_tokenizer
from jaxmoe.model import plain_ops
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_rl_state
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.vllm.client.teacher import open_teacher_server
from tests.jaxmoe.commands import TINIEST, arguments, lines, train_here
from tests.jaxmoe.random_weights import random_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

OPS = plain_ops()
# The longest prompt fills a block of vLLM's cache on a CPU, 128 tokens, which its samples share.
PROMPT, NEW, SAMPLES = 139, 17, 3
CONTEXT = 192
ATOL = 5e-5  # nats, as between vLLM and the trainer in test_export_vllm.py
TEACHER = resolve(
    load_config("tiny_vllm.py"),
    "model.d_model=64",
    "model.d_expert=64",
    "save.export_dtype=float32",
)
SAMPLED = "distill.reverse_kl_coef=0", "distill.advantage_coef=1", "distill.timeout_s=60"


@pytest.fixture(scope="module")
def params():
    return random_weights(TEACHER.model, 0)


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    """The export of a run with these weights."""
    work = tmp_path_factory.mktemp("teacher")
    cfg = replace(TEACHER, workdir=str(work / "run"))
    state = init_rl_state(params, cfg, rl_optimizer(cfg))
    save_run(work / "run", cfg, Position("rl", 1, state, {}))
    export.export_checkpoint(cfg, work / "export")
    return work / "export"


@pytest.fixture(scope="module")
def vllm(folder):
    with serve_folder(folder, folder.parent / "vllm.log", context=CONTEXT) as server:
        yield server


def student_words(work, teacher, *settings):
    sizes = *TINIEST, *SAMPLED, f"distill.teacher={teacher}", *settings
    return arguments(work, *sizes, config="tiny_distill.py")


def run(work, teacher, *settings):
    """The lines of RL's steps."""
    assert train_here(student_words(work, teacher, *settings)) == 0
    return read_steps(work)


def read_steps(work):
    return [row for row in lines(work) if row["stage"] == "rl" and "loss" in row]


def read_refusal(capsys, work, teacher, *settings):
    """The one line with which a run is refused."""
    capsys.readouterr()
    assert train_here(student_words(work, teacher, *settings)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


def sample_answers(params):
    """Answers of several lengths to prompts of several lengths, by the native engine."""
    engine = NativeEngine(
        TEACHER.model, OPS, max_prompt_tokens=PROMPT, max_new_tokens=NEW, max_rows=16
    )
    engine.load(params, 0)
    prompts = []
    for i, length in enumerate((1, 2, 9, PROMPT)):
        tokens = np.random.default_rng(i).integers(0, TEACHER.model.vocab_size, length)
        prompts.append(Prompt(i, "", tuple(tokens.tolist()), None))
    sampling = Sampling(max_new_tokens=NEW, stop_ids=tuple(range(24)))  # some stop early
    rollouts = engine.generate(prompts, sampling, seed=5, samples=SAMPLES)
    rewards = np.zeros(len(rollouts), np.float32)
    return rollout_batch(rollouts, rewards, samples=SAMPLES, length=PROMPT + NEW + 3, pad_id=257)


def test_log_probs_of_vllm_engine_and_trainer_agree(params, vllm):
    batch = sample_answers(params)
    mask = np.asarray(batch.loss_mask_BT)
    assert len(set(mask.sum(axis=1).tolist())) > 2  # ragged
    cfg = override(load_config("tiny.py"), f"distill.teacher={vllm.url}", *SAMPLED)
    server = open_teacher_server(cfg)
    scored, metrics = server.score_batch(batch)
    served = np.asarray(scored.teacher_logp_BT)
    again, _ = server.score_batch(batch)  # now vLLM's cache has every prompt
    scorer = Scorer(TEACHER.model, OPS)
    trainer = jax.jit(lambda p, b: scorer.score_policy(Trained(p), b)["logp_BT"])(params, batch)
    trainer, engine = np.asarray(trainer), np.asarray(batch.rollout_logp_BT)
    assert metrics == {"distill/lost_rows": 0.0} and not served[~mask].any()
    np.testing.assert_array_equal(scored.loss_mask_BT, mask)
    pairs = ((served, trainer), (served, engine), (again.teacher_logp_BT, trainer))
    gaps = [float(np.abs(a - b)[mask].max()) for a, b in pairs]
    # Log-probs of the token before or after would be far off.
    shifted = [np.abs(np.roll(served, by, axis=1) - trainer)[mask] for by in (-1, 1)]
    print(
        f"|Δlogp| {gaps}; a token off: {[(float(x.max()), float(np.median(x))) for x in shifted]}"
    )
    assert max(gaps) <= ATOL
    assert all(x.max() > 1 and np.median(x) > 0.1 for x in shifted)


def test_listed_words_are_the_teachers_likeliest(params, vllm):
    top_k = 5
    batch = sample_answers(params)
    mask = np.asarray(batch.loss_mask_BT)
    listing = "distill.reverse_kl_coef=1", "distill.advantage_coef=0", f"distill.top_k={top_k}"
    cfg = override(load_config("tiny.py"), f"distill.teacher={vllm.url}", *listing)
    scored, metrics = open_teacher_server(cfg).score_batch(batch)
    assert metrics == {"distill/lost_rows": 0.0}
    scorer = Scorer(TEACHER.model, OPS)
    hidden_BTD = jax.jit(lambda p, b: scorer.run_forward(p, b)[0])(params, batch)
    logits_BTV = np.asarray(hidden_BTD @ params["head"], np.float64)[..., : cfg.model.vocab_size]
    logp_BTV = logits_BTV - np.logaddexp.reduce(logits_BTV, axis=-1, keepdims=True)
    logp_BTV = np.roll(logp_BTV, 1, axis=1)  # of each token given those before it
    ids_BTK, top_BTK = scored.teacher_top_ids_BTK, scored.teacher_top_logp_BTK
    np.testing.assert_array_equal(ids_BTK >= 0, mask[..., None].repeat(top_k, axis=-1))
    ids, top, logp = ids_BTK[mask], top_BTK[mask], logp_BTV[mask]
    np.testing.assert_allclose(top, np.take_along_axis(logp, ids, axis=1), atol=ATOL)
    # Words whose log-probs are closer than the tolerance may change places.
    np.testing.assert_allclose(top, -np.sort(-logp, axis=1)[:, :top_k], atol=2 * ATOL)


@pytest.fixture(scope="module")
def learned(vllm, tmp_path_factory):
    """The folder of a run with the server as its teacher, and its steps."""
    work = tmp_path_factory.mktemp("served") / "run"
    return work, run(work, vllm.url)


def test_vllm_teaches_as_the_folder_does(folder, learned, tmp_path):
    _, served = learned
    read = run(tmp_path / "read", folder)
    assert len(served) == len(read) == 3
    for a, b in zip(served, read, strict=True):
        assert a.pop("distill/lost_rows") == 0.0 and a.keys() == b.keys()
        assert a["distill/reverse_kl"] > 0 and a["grad/norm"] > 0
        for name, value in b.items():
            if isinstance(value, float):
                np.testing.assert_allclose(a[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    print("reverse KL", [row["distill/reverse_kl"] for row in served])


def test_another_model_or_tokenizer_is_refused(vllm, learned, tmp_path, capsys):
    with run_teacher() as other:  # it serves a model of another name
        err = read_refusal(capsys, learned[0], other, "steps=4")
    assert "distill.teacher had other contents" in err
    # Two bytes that change places: as many ids, and the same texts of all others.
    file = write_byte_tokenizer(tmp_path / "tokenizer")
    text = json.loads(file.read_text())
    vocab = text["model"]["vocab"]
    vocab["e"], vocab["f"] = vocab["f"], vocab["e"]
    file.write_text(json.dumps(text))
    assert tokenizers.Tokenizer.from_file(str(file)).encode("e").ids == [ord("f")]
    err = read_refusal(capsys, tmp_path / "run", vllm.url, f"init.tokenizer={file}")
    assert "distill.teacher must have the policy's tokenizer" in err
    err = read_refusal(capsys, tmp_path / "run", vllm.url, f"data.max_prompt_tokens={CONTEXT - 6}")
    assert f"--max-model-len {CONTEXT + 1}" in err and not (tmp_path / "run").exists()


def kill_after(server, work, step):
    """Kill the server once the run has written this step."""
    while not any(row["step"] >= step for row in read_steps(work)):
        if server.process.poll() is not None:
            return
        time.sleep(0.005)
    server.kill()


def test_a_killed_vllm_ends_the_run(vllm, learned, tmp_path, capsys):
    _, uninterrupted = learned
    work, settings = tmp_path / "run", ("steps=200", "distill.timeout_s=20")
    killer = threading.Thread(target=kill_after, args=(vllm, work, 2))
    killer.start()
    capsys.readouterr()
    assert train_here(student_words(work, vllm.url, *settings)) == 1
    killer.join()
    err = capsys.readouterr().err
    assert err.startswith("error: distill.teacher must score the answers; of the 8 of this step")
    assert "Nothing was trained on. Start the server again" in err and err.strip().count("\n") == 0
    # Each step before was trained on rows with log-probs, the first two on all of them.
    steps = read_steps(work)
    assert f"saved rl step {steps[-1]['step']} in {work}" in err
    assert [row["distill/lost_rows"] for row in steps[:2]] == [0.0, 0.0]
    assert all(row["distill/lost_rows"] < 8 and np.isfinite(row["loss"]) for row in steps)
    for a, b in zip(steps[:2], uninterrupted, strict=False):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-4, atol=1e-4)
    # The same command while it is down: refused before anything is computed.
    err = read_refusal(capsys, work, vllm.url, *settings)
    assert "distill.teacher=http://" in err and "must be a vLLM that returns log-probs" in err
    assert read_steps(work) == steps
