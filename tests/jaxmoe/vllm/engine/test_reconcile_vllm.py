# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with one thing wrong: the fault is named from what it samples."""

import io
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from random_weights import random_weights

from jaxmoe.checkpoint.hf import save_params
from jaxmoe.config import ConfigError, VllmConfig
from jaxmoe.config_file import load_config
from jaxmoe.doctor import record_modules
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.model import plain_ops
from jaxmoe.reconcile.compare import explain_gap
from jaxmoe.reconcile.handshake import Handshake
from jaxmoe.reconcile.op_comparison import (
    ComparisonPrograms,
    compare_ops,
    compute_op_differences,
    score_with_differences,
)
from jaxmoe.reconcile.recompute import Programs, run_head, run_trunk
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.client import sync
from jaxmoe.vllm.engine.vllm_engine import VllmEngine
from tests.jaxmoe.small_models import SIX_EXPERTS

pytestmark = pytest.mark.vllm

OPS = plain_ops()
CFG = replace(SIX_EXPERTS, max_context=4096)
RUN = Programs(
    jax.jit(partial(run_trunk, ops=OPS), static_argnames="cfg"),
    jax.jit(partial(run_head, ops=OPS), static_argnames=("cfg", "top_k", "top_p")),
)
COOL = Sampling(24, (), temperature=0.7)
PROMPTS = [
    Prompt(i, "", tuple(np.random.default_rng(i).integers(0, 97, 8 + i).tolist()), None)
    for i in range(12)
]


@cache
def weights(seed):
    return random_weights(CFG, seed)


@contextmanager
def vllm(work, args="", dtype=""):
    """A vLLM in this process; its probe lets everything through, for the doctor to see."""
    rollouts = VllmEngine(
        CFG,
        OPS,
        VllmConfig(launch=0, args=args, dtype=dtype, weights_dir=str(work), probe_abs_diff=1e9),
        work=work,
        max_prompt_tokens=24,
        max_new_tokens=24,
        max_rows=12,
    )
    try:
        yield rollouts
    finally:
        rollouts.close()


def examined(engine, dtype="float32", **options):
    rollouts = engine.generate(PROMPTS, COOL, seed=1)
    r = explain_gap(rollouts, weights(0), CFG, COOL, run=RUN, handshake=Handshake(dtype), **options)
    v = r.verdict
    regret = max((x.regret for x in r.layers), default=0.0)
    print(
        f"\n{v.kind} {[f.name for f in v.faults]} gap {v.gap:.2e} left {v.remaining:.2e} rounding "
        f"{r.rounding.trainer:.1e}/{r.rounding.engine:.1e} "
        f"replayed {r.replayed} regret {regret:.1e}"
    )
    return tuple(f.name for f in v.faults) or (v.kind,)


def pieces_are_all_there_is(engine):
    """Each of vLLM's modules, given what the trainer's piece is given, differs by rounding."""
    rollouts = engine.generate(PROMPTS[:5], COOL, seed=1, samples=2)
    config = replace(load_config("tiny_vllm.py"), model=CFG)
    recorded = record_modules(engine, rollouts, config)
    assert recorded is not None and recorded[0].shape == (4, 8 + 24)  # the shortest prompt's
    steps = ComparisonPrograms(
        *(
            jax.jit(partial(f, cfg=CFG, ops=OPS))
            for f in (compute_op_differences, score_with_differences)
        )
    )
    comparison = compare_ops(weights(0), *recorded, steps)
    print(comparison)
    assert 0 < comparison.gap < 1e-5 and comparison.tokens == 4 * 31
    assert max(op.max_difference for op in comparison.ops) < 2e-5, "a place is another module's"
    gaps = {op.op: op.gap for op in comparison.ops}
    assert gaps["embedding"] == gaps["residual sums"] == 0.0 < gaps["attention"]
    backend, row = engine.backends[0], list(range(20))
    with pytest.raises(RequestFailed, match="exactly one forward must run during"):
        backend.record_forward(lambda: [backend.score_tokens(row, CFG) for _ in range(2)])
    backend.score_tokens(row, CFG)  # and nothing is left of it

    def unknown(_):
        raise RequestFailed("vLLM's GPT-OSS must have the modules that are recorded")

    backend.record_forward, record_forward = unknown, backend.record_forward
    with redirect_stdout(io.StringIO()) as printed:  # vLLM closes what capsys has
        assert record_modules(engine, rollouts, config) is None
    assert "per-op comparison: skipped; vLLM's GPT-OSS must have" in printed.getvalue()
    backend.record_forward = record_forward


def test_vllm_agrees_and_stock_reload_weights_is_named(tmp_path):
    """The upstream defect: reload_weights leaves experts and sinks as they were, with a warning."""
    save_params(weights(1), CFG, tmp_path / "model", dtype="float32")
    save_params(weights(0), CFG, tmp_path / "newer", dtype="float32")
    with vllm(tmp_path, "--load-format auto") as engine:
        engine.load(weights(0), 1)
        assert examined(engine, previous=weights(1)) == ("agree",)
        pieces_are_all_there_is(engine)
        engine.load(weights(1), 2)
        backend = engine.backends[0]
        reload = partial(backend._llm.collective_rpc, "reload_weights")
        backend._call_llm(lambda: reload(kwargs={"weights_path": str(tmp_path / "newer")}))
        assert backend.reset_prefix_cache()
        assert set(examined(engine, previous=weights(1))) == {"stale_experts", "stale_sinks"}


@pytest.mark.slow
def test_raw_logprobs_are_refused_or_named(tmp_path, monkeypatch):
    raw = "--logprobs-mode raw_logprobs"
    with pytest.raises(
        ConfigError, match=raw.replace("raw", "processed") + ", it has raw_logprobs"
    ):
        with vllm(tmp_path, raw):
            pass
    monkeypatch.setattr(sync, "LOGPROBS_MODE", "raw_logprobs")  # as of a plugin that cannot tell
    with vllm(tmp_path, raw) as engine:
        engine.load(weights(0), 1)
        assert examined(engine) == ("raw_logprobs",)


def test_an_engine_in_bfloat16_is_named(tmp_path):
    with vllm(tmp_path, dtype="bfloat16") as engine:
        engine.load(weights(0), 1)
        (worker,) = engine.backends[0].loaded_state()
        assert worker["model"]["dtype"] == "bfloat16"
        assert examined(engine, "bfloat16") == ("all_bfloat16",)


@pytest.mark.parametrize(
    "window, name", [(8, "window_minus_one"), (10, "window_plus_one"), (4096, "window_off")]
)
def test_another_window_in_the_engines_config_is_named(tmp_path, window, name):
    with vllm(tmp_path, f"--hf-overrides '{{\"sliding_window\": {window}}}'") as engine:
        engine.load(weights(0), 1)
        assert examined(engine) == (name,)
