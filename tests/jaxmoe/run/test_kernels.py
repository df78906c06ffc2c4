# SPDX-License-Identifier: Apache-2.0
"""The choice of kernels: from the config or by import into every piece, told, kept, refused."""

import json

import jax
import pytest

from jaxmoe import doctor, eval, train
from jaxmoe.checkpoint.same_run import check_resume
from jaxmoe.config import KERNELS, ConfigError, to_json
from jaxmoe.config_file import load_config, override
from jaxmoe.model import abstract_params, forward, make_ops, plain_ops, sequence_logprobs
from jaxmoe.model.cache import init_cache
from jaxmoe.run import parts
from jaxmoe.run.kernels import choose_run_kernels, decide_kernels, describe_kernels, run_cases
from pallas_kernels.check import child, one
from pallas_kernels.check.choice import PLATFORMS
from pallas_kernels.check.verdicts import KernelVerdict
from pallas_kernels.decode_attention import api as decoding
from pallas_kernels.grouped_matmul import api as matmul
from pallas_kernels.sink_attention import api as attention
from pallas_kernels.token_logprobs import api as logprobs

TINY = load_config("tiny.py")
LONG = override(TINY, "data.max_prompt_tokens=4096", "rollout.max_new_tokens=4096")
H200 = {"platform": "gpu", "kind": "NVIDIA H200", "driver": "", "jax": ""}

RIGHT, WRONG = (
    KernelVerdict("right", "5 cases"),
    KernelVerdict("wrong", "case ragged: o: relative error 1"),
)


def decided(cfg, chip=H200, **verdicts):
    return decide_kernels(cfg, lambda: chip, lambda _: lambda _operation, impl: verdicts[impl])


def asked_of(ops, cfg, monkeypatch):
    """Which `impl` each operation is asked for, in the forward, with a cache too, and the head."""
    requests = {}
    for api, first in (
        (attention, "sink_attention"),
        (decoding, "decode_attention"),
        (logprobs, "token_logprobs"),
        (matmul, "grouped_matmul"),
    ):

        def pick(impl, impls, *arrays, real=api.select_implementation, first=first):
            swiglu = impls is getattr(matmul, "SWIGLU_IMPLS", None)
            requests["grouped_swiglu" if swiglu else first] = impl
            return real("xla", impls, *arrays)

        monkeypatch.setattr(api, "select_implementation", pick)

    def program(params, tokens_BT):
        hidden_BTD, _, _ = forward(params, tokens_BT, cfg.model, ops)
        cached, _, _ = forward(params, tokens_BT, cfg.model, ops, cache=init_cache(cfg.model, 2, 9))
        return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg.model, ops), cached

    jax.eval_shape(program, abstract_params(cfg.model), jax.ShapeDtypeStruct((2, 7), "int32"))
    return requests


@pytest.mark.parametrize("kernels", ["reference", "mosaic_gpu", "triton"])
def test_a_name_reaches_every_operation_and_import(kernels, monkeypatch):
    by_config = make_ops(override(TINY, f"kernels={kernels}"))
    by_import = make_ops(TINY, dict.fromkeys(PLATFORMS, kernels))
    only = "sink_attention" if kernels == "triton" else None
    assert asked_of(by_config, TINY, monkeypatch) == {
        operation: kernels if only in (None, operation) else "auto" for operation in PLATFORMS
    }
    assert set(asked_of(by_import, TINY, monkeypatch).values()) == {kernels}


def test_a_cpu_uses_plain_pieces_without_a_check(monkeypatch, capsys):
    monkeypatch.setattr(child, "run_child", lambda *_: pytest.fail("a process was started"))
    choice = choose_run_kernels(TINY)
    choice.print_decision()
    assert capsys.readouterr().out == "kernels  xla (this is a cpu)\n"
    assert set(choice.impls.values()) == {"auto"} and not choice.alerts
    ops = make_ops(TINY, choice.impls)
    assert ops == plain_ops() and ops == make_ops(TINY)


def test_a_right_kernel_has_xla_for_other_shapes():
    choice = decided(TINY, mosaic_gpu=RIGHT)
    assert choice.line == "mosaic_gpu" and not choice.alerts
    assert set(choice.impls.values()) == {("mosaic_gpu", "xla")}
    assert choice.names == dict.fromkeys(PLATFORMS, "mosaic_gpu")


def test_a_wrong_kernel_falls_back_with_an_alert():
    choice = decided(TINY, mosaic_gpu=WRONG, triton=RIGHT)
    assert choice.line.startswith(
        "sink_attention triton (not mosaic_gpu: failed in case ragged: o: relative error 1), "
        "decode_attention xla (not mosaic_gpu: failed in case ragged"
    )
    assert len(choice.alerts) == len(PLATFORMS)
    assert choice.alerts[0].startswith(
        "sink_attention uses triton instead of mosaic_gpu: failed in case ragged: o: relative "
        "error 1. "
        "To check it again type rm "
    )
    refuses = decided(TINY, mosaic_gpu=KernelVerdict("refuses", "head size 16"), triton=RIGHT)
    assert "decode_attention xla (not mosaic_gpu: unsupported: head size 16)" in refuses.line
    assert not refuses.alerts


@pytest.mark.parametrize(
    "kernels, chip, verdict, message",
    [
        ("mosaic_gpu", {"platform": "cpu"}, RIGHT, "it needs a gpu, but this machine has a cpu"),
        ("mosaic_tpu", H200, RIGHT, "it needs a tpu, but this machine has a gpu"),
        ("mosaic_gpu", H200, WRONG, "sink_attention: failed in case ragged: o: relative error 1"),
    ],
)
def test_an_unavailable_named_kernel_is_refused(kernels, chip, verdict, message):
    cfg = override(TINY, f"kernels={kernels}")
    with pytest.raises(
        ConfigError, match=f"^kernels={kernels} must be correct.*{message}.*Try --set"
    ):
        decided(cfg, chip, **{kernels: verdict})


def test_an_unopened_device_alerts_and_refuses_names():
    def no_chip():
        raise child.NoChip("a process that opens the device was killed by SIGSEGV")

    choice = decide_kernels(TINY, no_chip, lambda _: pytest.fail("judged"))
    assert set(choice.impls.values()) == {"auto"} and "SIGSEGV" in choice.alerts[0]
    with pytest.raises(ConfigError, match="could not be checked: a process that opens"):
        decide_kernels(
            override(TINY, "kernels=mosaic_tpu"), no_chip, lambda _: pytest.fail("judged")
        )


def test_xlas_attention_over_long_rows_must_be_named():
    verdicts = dict(
        mosaic_gpu=WRONG, triton=KernelVerdict("refuses", "No module named 'jax_triton'")
    )
    with pytest.raises(
        ConfigError, match="over 8,192 tokens.*o: relative error 1.*--set kernels=xla"
    ):
        decided(LONG, **verdicts)
    assert decided(LONG, mosaic_gpu=RIGHT).line == "mosaic_gpu"
    assert decided(TINY, **verdicts).names["sink_attention"] == "xla"
    assert decided(override(LONG, "kernels=xla")).line == "xla"
    assert decided(LONG, {"platform": "cpu"}).line == "xla (this is a cpu)"


def test_the_doctor_ignores_names_for_another_dtype():
    choice = decided(override(TINY, "kernels=mosaic_gpu"), mosaic_gpu=RIGHT)
    assert set(choice.impls.values()) == {"mosaic_gpu"}
    assert set(choice.with_xla_fallback.values()) == {("mosaic_gpu", "xla")}


@pytest.mark.parametrize("packed", [0, 4 * 58])
def test_the_runs_sizes_are_cases_of_every_operation(packed):
    verdict = json.loads(
        json.dumps(run_cases(override(TINY, f"optim.tokens_per_microbatch={packed}"), "gpu"))
    )
    all_verdicts = {
        o: [one.case_from_json(o, fields) for fields in several] for o, several in verdict.items()
    }
    assert all_verdicts.keys() == PLATFORMS.keys()
    cases = {operation: several[0] for operation, several in all_verdicts.items()}
    rows, m = 4 if packed else 256, TINY.model
    assert cases["sink_attention"][1:7] == (rows, 58, 58, m.n_q_heads, m.n_kv_heads, m.head_dim)
    assert cases["decode_attention"].T == 1 and cases["decode_attention"].S == 58
    assert cases["grouped_swiglu"].F == 2 * m.d_expert == 2 * cases["grouped_matmul"].D
    assert sum(cases["grouped_matmul"].group_sizes) == rows * 58 * m.experts_per_token
    assert cases["token_logprobs"].V == m.padded_vocab
    for operation in ("sink_attention", "decode_attention"):  # a layer of either kind
        full, sliding = all_verdicts[operation]
        assert (full.window, sliding.window) == (0, m.sliding_window)
        assert sliding[1:3] == full[1:3] and sliding[4:7] == full[4:7]
        assert sliding.layout == full.layout
    assert all_verdicts["decode_attention"][1].S == m.sliding_window < 58  # its cache holds no more


@pytest.mark.parametrize(
    "name, changes, kinds",
    [
        ("tiny.py", (), [""]),
        ("tiny_mxfp4.py", (), ["_rounded"]),
        ("tiny_mxfp4.py", ("model.numerics=invariant",), ["_rounded"]),
        ("tiny_mxfp4.py", ("quant.experts=mxfp4_rollout",), ["", "_mxfp4"]),
        ("tiny_lora.py", ("lora.expert_rank=3",), ["", "_low_rank"]),
        ("tiny_lora.py", ("lora.expert_rank=0",), ["", "_mxfp4"]),
    ],
)
def test_the_runs_experts_are_cases_of_their_products(name, changes, kinds):
    cfg = override(load_config(name), *changes)
    for operation, width in (("grouped_swiglu", cfg.model.d_model), ("grouped_matmul", None)):
        cases_of_run = [case for case in run_cases(cfg, "gpu")[operation] if case["name"] == "run"]
        assert [case["op"] for case in cases_of_run] == [operation + kind for kind in kinds]
        assert {case["D"] for case in cases_of_run} == {width or cfg.model.d_expert}
        assert {case["rank"] for case in cases_of_run} == {cfg.lora.expert_rank}


def test_linear_layers_of_invariant_runs_are_grouped_cases():
    cfg = override(TINY, "model.numerics=invariant", "optim.microbatches=8")
    m = cfg.model
    sizes = {
        platform: {
            case["name"]: (case["M"], case["D"], case["F"], case["group_sizes"])
            for case in run_cases(cfg, platform)["grouped_matmul"][1:]
        }
        for platform in ("cpu", "gpu", "tpu")
    }
    rows, q, kv = 32 * 58, m.n_q_heads * m.head_dim, m.n_kv_heads * m.head_dim
    assert sizes["cpu"] == {} and kv < 128
    assert sizes["gpu"] == {
        "run_q": (rows, m.d_model, q, (rows,)),
        "run_kv": (rows, m.d_model, kv, (rows,)),
        "run_output": (rows, q, m.d_model, (rows,)),
    }
    assert sizes["tpu"]["run_kv"] == (rows, m.d_model, 128, (rows,))  # columns are padded


def test_only_names_of_implementations_are_choices():
    names = {name for impls in PLATFORMS.values() for name in impls}
    # those of model.numerics=invariant are no choice: only all ops together are batch-invariant
    assert set(KERNELS) == {"auto"} | {x for x in names if not x.endswith("_invariant")}
    for name in ("mosaic_b200", "mosaic_gpux", "fast"):
        # The closest letters may be of another chip.
        with pytest.raises(ConfigError, match="kernels must be one of auto.*--set kernels=auto.$"):
            override(TINY, f"kernels={name}")


@pytest.mark.parametrize("command", [train, eval, doctor])
def test_every_command_decides_before_it_opens_the_device(command, monkeypatch, capsys, tmp_path):
    opens = parts if command is train else command  # the module that opens the device
    monkeypatch.setattr(opens, "check_memory", lambda *_: pytest.fail("the device is open"))
    argv = ["--config", "tiny.py", "--workdir", str(tmp_path / "run"), "--set"]
    assert command.main([*argv, "kernels=mosaic_gpu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        "error: kernels=mosaic_gpu must be correct on this machine: it needs a gpu"
    )
    assert err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_named_kernels_use(capsys, tmp_path):
    argv = ["--config", "tiny.py", "--dry-run", "--workdir", str(tmp_path)]
    assert train.main([*argv, "--set", "kernels=mosaic_gpu"]) == 0
    assert "  kernels      mosaic_gpu, on gpu" in capsys.readouterr().out
    assert "for sink_attention; " in describe_kernels(override(TINY, "kernels=triton"))
    assert "on a CPU xla" in describe_kernels(TINY)
    assert "batch-invariant tiles" in describe_kernels(override(TINY, "model.numerics=invariant"))
    assert describe_kernels(override(TINY, "kernels=xla")) == "xla"


def test_a_resume_may_change_it_and_says_so(tmp_path):
    record = json.loads(to_json(TINY))
    changed = override(TINY, "kernels=xla")
    assert check_resume(tmp_path, record, changed) == ["kernels=xla (was auto)"]
    del record["kernels"]  # of a checkpoint from before
    assert check_resume(tmp_path, record, TINY) == []
    assert check_resume(tmp_path, record, changed) == ["kernels=xla (was auto)"]
