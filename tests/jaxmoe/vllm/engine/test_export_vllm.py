# SPDX-License-Identifier: Apache-2.0
"""A real vLLM serves what a run exported: our log-probs, and its answers stop."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_weights

from jaxmoe import export
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.config_file import load_config, resolve
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state

pytestmark = pytest.mark.vllm


def test_vllm_serves_exports_with_our_log_probs(tmp_path, monkeypatch):
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0" if "VLLM" in name else "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    vllm = importlib.import_module("vllm")
    cfg = resolve(
        load_config("tiny_vllm.py"), "save.export_dtype=float32", f"workdir={tmp_path}/run"
    )
    params = random_weights(cfg.model, 0)
    stop = ByteTokenizer().stop_ids[0]
    # an entry that all tokens share, read by the head for one of them: it is likely everywhere
    params["embed"] = params["embed"].at[:, 0].set(2.0)
    params["head"] = params["head"].at[0, stop].set(2.0)
    state = init_rl_state(params, cfg, rl_optimizer(cfg))
    save_run(tmp_path / "run", cfg, Position("rl", 1, state, {}))
    export.export_checkpoint(cfg, tmp_path / "out")
    engine = vllm.LLM(
        model=str(tmp_path / "out"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=8,
    )
    text = "Spell this word backward: cat"
    sampling = vllm.SamplingParams(temperature=1.0, seed=1, n=8, max_tokens=60, prompt_logprobs=0)
    (answer,) = engine.generate([text], sampling)
    tokens = list(text.encode())
    assert answer.prompt_token_ids == tokens
    ids = jnp.asarray([tokens], jnp.int32)
    logp_fn = jax.jit(
        lambda p, ids: sequence_logprobs(
            p, forward(p, ids, cfg.model, plain_ops())[0], ids, cfg.model, plain_ops()
        )[0]
    )
    trainer_logp = np.asarray(logp_fn(params, ids))[0, 1:]
    vllm_logp = [
        row[t].logprob for row, t in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
    ]
    gap = np.abs(trainer_logp - vllm_logp).max()
    print(f"|Δlogp| {gap:.2e}", [(len(o.token_ids), o.finish_reason) for o in answer.outputs])
    assert gap <= 5e-5
    assert any(o.finish_reason == "stop" for o in answer.outputs)
    for output in answer.outputs:
        assert stop not in output.token_ids[:-1]
