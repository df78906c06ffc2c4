# SPDX-License-Identifier: Apache-2.0
"""Runs with model.numerics=invariant: exact at every step, stopped where not, refused elsewhere."""

from dataclasses import replace

import jax
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model.ops import make_ops
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.run.kernels import decide_kernels
from jaxmoe.run.parts import make_parts
from jaxmoe.train import train
from pallas_kernels import decode_attention, sink_attention
from pallas_kernels.check import child
from pallas_kernels.check.choice import make_judge
from pallas_kernels.check.verdicts import KernelVerdict
from tests.jaxmoe.commands import arguments, train_here

# The entropy bonus is a gradient, whatever the rewards of a model this untrained.
SETTINGS = (
    "model.numerics=invariant data.train_rows=64 data.held_out_rows=8 warmup.steps=3 steps=2 "
    "warmup.sequences_per_step=16 rollout.sequences_per_step=16 rollout.max_gen_batches=1 "
    "eval.every_steps=2 rollout.temperature=0.7 loss.entropy_coef=0.01"
).split()


@pytest.mark.slow
def test_a_runs_log_probs_match_the_engine_bitwise(tmp_path):
    # cut by top-k and top-p: the log-prob travels in two parts
    settings = (*SETTINGS, "rollout.top_k=40", "rollout.top_p=0.9")
    assert train_here(arguments(tmp_path / "run", *settings)) == 0
    rows = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["stage"] == "rl"]
    steps = [r for r in rows if "train_rollout_logprob_abs_diff_max" in r]
    assert len(steps) == 2
    for row in steps:
        assert row["train_rollout_logprob_abs_diff_max"] == 0.0
        assert row["router/expert_switches"] == 0.0
        assert row["batch/computed_tokens_frac"] < 0.75  # prompts are shared
        assert row["policy/ratio_max"] == 1.0 and row["grad/norm"] > 0


@pytest.mark.slow
def test_a_difference_stops_the_run_and_is_traced(tmp_path):
    cfg = override(load_config("tiny.py"), *SETTINGS, "gate.skip=True", f"workdir={tmp_path}")
    parts = make_parts(cfg)
    perturbed = replace(parts, ops=replace(parts.ops, decode=decode_attention))
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ConfigError) as error:
        train(cfg, perturbed)
    text = str(error.value)
    assert (
        "rl step 1: with model.numerics=invariant trainer and engine must agree to the bit" in text
    )
    assert "layer 0: the input of its experts (attention" in text and "\n" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.engine=vllm", "rollout.engine=native"),
        ("kernels=triton", "kernels=auto"),
        ("rollout.max_parallel_sequences=4", "rollout.max_parallel_sequences=8"),
        ("mesh.tensor=2", "mesh.tensor=1"),
        ("mesh.expert=2", "mesh.fsdp=2"),
        ("mesh.data=64", "rollout.max_parallel_sequences=512"),
        ("model.numerics=exact", "model.numerics=invariant"),
    ],
)
def test_settings_that_break_it_are_refused_with_advice(change, message):
    with pytest.raises(ConfigError) as error:
        override(load_config("tiny.py"), "model.numerics=invariant", change)
    assert f"--set {message}" in str(error.value).replace("\n", " ")


INVARIANT = override(load_config("tiny.py"), "model.numerics=invariant", "model.dtype=bfloat16")
PASSED = KernelVerdict("right", "5 cases")


def decided(kind, cfg=INVARIANT, verdict=PASSED):
    chip = {"platform": "tpu" if "TPU" in kind else "gpu", "kind": kind}
    return decide_kernels(cfg, lambda: chip, lambda chip: lambda operation, impl: verdict)


@pytest.mark.parametrize(
    "kind, impl",
    [
        ("NVIDIA H100 80GB HBM3", "mosaic_gpu"),
        ("TPU v5 lite", "mosaic_tpu"),
        ("TPU v5", "mosaic_tpu"),
        ("TPU v6 lite", "mosaic_tpu"),
    ],
)
def test_chips_with_checked_programs_use_their_kernels(kind, impl):
    choice = decided(kind)
    assert set(choice.impls.values()) == {f"{impl}_invariant"}
    assert "batch-invariant tiles" in choice.line
    attend = make_ops(INVARIANT, choice.impls).attend
    assert attend.__wrapped__.func is sink_attention
    assert attend.__wrapped__.keywords["impl"] == f"{impl}_invariant"
    named = override(INVARIANT, f"kernels={impl}")
    assert make_ops(named).attend.__wrapped__.keywords["impl"] == f"{impl}_invariant"


@pytest.mark.parametrize(
    "kind, setting, verdict, message",
    [
        ("NVIDIA A100-SXM4-80GB", "steps=1", PASSED, "this is a NVIDIA A100-SXM4-80GB"),
        ("TPU v4", "steps=1", PASSED, "this is a TPU v4"),
        ("NVIDIA H200", "kernels=xla", PASSED, "must run in mosaic_gpu on a gpu, got kernels=xla"),
        ("NVIDIA H200", "optim.tokens_per_microbatch=4096", PASSED, "needs rows of one sequence"),
        ("NVIDIA H200", "steps=1", KernelVerdict("wrong", "ragged: o: error 1"), "o: error 1"),
        ("TPU v5", "mesh.data=2", PASSED, "must run on one GPU or TPU, got a mesh of 2"),
        ("TPU v5", "kernels=mosaic_gpu", PASSED, "must run in mosaic_tpu on a tpu"),
    ],
)
def test_chips_without_checked_programs_are_refused(kind, setting, verdict, message):
    with pytest.raises(ConfigError) as error:
        decided(kind, override(INVARIANT, setting), verdict)
    assert message in str(error.value) and "--set model.numerics=fast" in str(error.value)


@pytest.mark.slow
def test_a_wrong_tile_of_invariant_kernels_stops_runs(tmp_path):
    """A double of a TPU: its kernels, interpreted in the process of the check.

    A check of the fast kernels would pass, and a run could not notice: engine and trainer share
    the wrong tile.
    """
    doubles, requests = "tests.pallas_kernels.check.doubles", []

    def decide(planted):
        def judge_on(chip):
            here = make_judge(chip, "float32", {}, folder=tmp_path, log_line=lambda _: None)

            def judge(operation, impl):
                requests.append(impl)
                double = f"{doubles}:{'planted' if planted else 'correct'}_{impl}"
                return here(operation, double) if operation == "token_logprobs" else PASSED

            return judge

        chip = {"platform": "tpu", "kind": "TPU v5 lite"}
        return decide_kernels(INVARIANT, lambda: chip, judge_on)

    with pytest.raises(ConfigError, match="token_logprobs: failed in case padded_head: logp: rel"):
        decide(planted=True)
    assert set(decide(planted=False).impls.values()) == {"mosaic_tpu_invariant"} == set(requests)


def test_an_unopened_chip_is_refused():
    def raise_no_chip():
        raise child.NoChip("a process that opens the device hangs")

    with pytest.raises(ConfigError, match="must know the device.*JAX_PLATFORMS=cpu"):
        decide_kernels(INVARIANT, raise_no_chip, lambda chip: lambda operation, impl: PASSED)
