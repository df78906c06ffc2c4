# SPDX-License-Identifier: Apache-2.0
"""What runs follows from the verdicts; faults planted in doubles of kernels are found in time."""

import json
import threading
import time

import pytest

from pallas_kernels.bench.ops import OPS
from pallas_kernels.check import cases, child, choice, one
from pallas_kernels.check.choice import PLATFORMS, Choice, KernelRefused, choose_kernels, make_judge
from pallas_kernels.check.verdicts import KernelVerdict
from pallas_kernels.grouped_matmul.cases import MatmulCase
from tests.pallas_kernels.check.made_verdicts import REFUSES, RIGHT, WRONG, judged

DOUBLES = "tests.pallas_kernels.check.doubles"


def test_auto_takes_the_first_right_kernel():
    requests = []
    choices = choose_kernels("auto", "gpu", judged(requests, mosaic_gpu=RIGHT))
    assert {c.impl for c in choices.values()} == {("mosaic_gpu", "xla")}
    assert requests == [(operation, "mosaic_gpu") for operation in PLATFORMS]
    assert (
        choose_kernels("auto", "tpu", judged(mosaic_tpu=RIGHT))["token_logprobs"].name
        == "mosaic_tpu"
    )


def test_auto_names_the_wrong_kernel_it_passes():
    choices = choose_kernels("auto", "gpu", judged(mosaic_gpu=WRONG, triton=RIGHT))
    assert choices["sink_attention"] == Choice(("triton", "xla"), (("mosaic_gpu", WRONG),))
    assert choices["decode_attention"] == Choice("xla", (("mosaic_gpu", WRONG),))


def test_on_a_cpu_nothing_is_asked():
    choices = choose_kernels("auto", "cpu", judged())
    assert {c.impl for c in choices.values()} == {"xla"}
    assert {c.rejected for c in choices.values()} == {()}
    assert {c.impl for c in choose_kernels("reference", "gpu", judged()).values()} == {"reference"}


def test_operations_without_the_named_kernel_use_auto():
    choices = choose_kernels("triton", "gpu", judged(triton=RIGHT, mosaic_gpu=RIGHT))
    assert choices.pop("sink_attention").impl == "triton"
    assert {c.impl for c in choices.values()} == {("mosaic_gpu", "xla")}
    assert choice.requested_impls("triton") == dict.fromkeys(PLATFORMS, "auto") | {
        "sink_attention": "triton"
    }


GPU = {"platform": "gpu", "kind": "NVIDIA H200", "driver": "", "jax": "0.12"}


class Checks:
    """In place of child.check_kernel: its answers, and how many ran at once."""

    def __init__(self, monkeypatch, answer, together=1):
        self.answer, self.barrier = answer, threading.Barrier(together)
        self.running, self.most, self.asked = 0, 0, []
        self.lock = threading.Lock()
        monkeypatch.setattr(child, "check_kernel", self)

    def __call__(self, operation, impl, *_):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.asked.append((operation, impl))
            running = self.running
        try:
            if len(self.asked) <= self.barrier.parties:
                self.barrier.wait(20)  # breaks unless so many checks run at once
                running = self.barrier.parties
            return self.answer(operation, impl, running)
        finally:
            with self.lock:
                self.running -= 1


def chosen(chip, folder, name="auto"):
    """The choice, and the lines that were printed."""
    printed = []
    judge = make_judge(chip, "bfloat16", {}, folder=folder, log_line=printed.append)
    return choose_kernels(name, chip["platform"], judge), printed


@pytest.mark.parametrize("name", ["auto", "mosaic_gpu", "mosaic_gpu_invariant"])
def test_a_gpu_checks_operations_at_once(monkeypatch, tmp_path, name):
    impl = name.replace("auto", "mosaic_gpu")
    checks = Checks(monkeypatch, lambda *_: RIGHT, together=4)
    choices, printed = chosen(GPU, tmp_path, name)
    assert checks.most == 4 and len(checks.asked) == len(PLATFORMS) == 5
    assert {c.name for c in choices.values()} == {impl}
    assert printed == [f"checking {o} with {impl} on NVIDIA H200…" for o in PLATFORMS]
    assert len(list(tmp_path.glob("*.json"))) == len(PLATFORMS)
    second_checks = Checks(monkeypatch, lambda *_: pytest.fail("checked again"))
    assert chosen(GPU, tmp_path, name) == (choices, []) and second_checks.most == 0


def test_a_tpu_checks_operations_in_turn(monkeypatch, tmp_path):
    checks = Checks(monkeypatch, lambda *_: time.sleep(0.05) or RIGHT)
    choices, printed = chosen(GPU | {"platform": "tpu", "kind": "TPU v6 lite"}, tmp_path)
    assert checks.most == 1 and checks.asked == [(o, "mosaic_tpu") for o in PLATFORMS]
    assert [x.split()[1] for x in printed] == list(PLATFORMS)
    assert {c.name for c in choices.values()} == {"mosaic_tpu"}


def test_checks_at_once_choose_as_in_turn(monkeypatch, tmp_path):
    def answer(operation, impl, _):
        if operation == "token_logprobs":
            raise child.NoChip("no memory, ever")
        if impl == "triton":
            return RIGHT
        return {"sink_attention": WRONG, "grouped_matmul": REFUSES}.get(operation, RIGHT)

    Checks(monkeypatch, answer, together=4)
    at_once, _ = chosen(GPU, tmp_path / "at_once")
    monkeypatch.setattr(choice, "CHECKS_AT_ONCE", {})
    checks = Checks(monkeypatch, answer)
    in_turn, _ = chosen(GPU, tmp_path / "in_turn")
    assert checks.most == 1 and at_once == in_turn and list(at_once) == list(in_turn)
    assert at_once["sink_attention"].name == "triton"
    files = [sorted(x.name for x in (tmp_path / y).iterdir()) for y in ("at_once", "in_turn")]
    assert files[0] == files[1] and len(files[0]) == len(PLATFORMS)  # triton's and no unknown one


@pytest.mark.parametrize("alone", [RIGHT, WRONG, None])
@pytest.mark.parametrize(
    "beside",
    [
        None,
        KernelVerdict("wrong", "case ragged: it raised JaxRuntimeError: INTERNAL: cuBLAS"),
        KernelVerdict("wrong", "case ragged: the process gave no result in 600 s"),
    ],
)
def test_a_check_without_result_is_repeated_alone(monkeypatch, tmp_path, beside, alone):
    def answer(operation, impl, count):
        if operation != "grouped_swiglu":
            return RIGHT
        verdict = beside if count > 1 else alone
        if verdict is None:
            raise child.NoChip("the process ran out of memory")
        return verdict

    checks = Checks(monkeypatch, answer, together=4)
    choices, printed = chosen(GPU, tmp_path)
    assert checks.asked[-1] == ("grouped_swiglu", "mosaic_gpu")
    assert len(checks.asked) == len(PLATFORMS) + 1
    assert printed[-1].startswith("checking grouped_swiglu with mosaic_gpu again, alone: ")
    unknown = KernelVerdict("unknown", "the process ran out of memory")
    rejected = () if alone is RIGHT else (("mosaic_gpu", alone or unknown),)
    assert choices["grouped_swiglu"].rejected == rejected
    assert len(list(tmp_path.glob("*.json"))) == len(PLATFORMS) - (alone is None)


def test_a_wrong_number_is_not_checked_again(monkeypatch, tmp_path):
    checks = Checks(monkeypatch, lambda *_: WRONG, together=4)
    with pytest.raises(KernelRefused, match="sink_attention: failed in case ragged: o: relative"):
        chosen(GPU, tmp_path, "mosaic_gpu")
    assert len(checks.asked) == len(PLATFORMS)


def test_other_platforms_kernels_are_refused_before_checks(monkeypatch, tmp_path):
    Checks(monkeypatch, lambda *_: pytest.fail("checked"))
    with pytest.raises(KernelRefused, match="it needs a tpu, but this machine has a gpu"):
        chosen(GPU, tmp_path, "mosaic_tpu")


def test_an_interruption_ends_the_checks_that_run(monkeypatch, tmp_path):
    stops = []

    def interrupted(operation, impl, dtype, real, timeout_s, stop):
        stops.append(stop)
        if operation == "sink_attention":
            raise KeyboardInterrupt
        assert stop.wait(20)
        return RIGHT

    monkeypatch.setattr(child, "check_kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chosen(GPU, tmp_path)
    assert all(stop.is_set() for stop in stops) and not list(tmp_path.iterdir())


def test_a_superfluous_child_is_killed(monkeypatch):
    monkeypatch.setattr(child, "_START", "import time; time.sleep(60)")
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    start = time.monotonic()
    child.run_child({}, 60.0, stop)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "platform, verdict, message",
    [
        ("tpu", RIGHT, "it needs a gpu, but this machine has a tpu"),
        ("cpu", RIGHT, "it needs a gpu, but this machine has a cpu"),
        ("gpu", WRONG, "sink_attention: failed in case ragged: o: relative error 1"),
        ("gpu", REFUSES, "sink_attention: unsupported: it needs a Hopper GPU"),
    ],
)
def test_an_unavailable_named_kernel_is_refused(platform, verdict, message):
    with pytest.raises(KernelRefused, match=message):
        choose_kernels("mosaic_gpu", platform, judged(mosaic_gpu=verdict))


@pytest.mark.parametrize(
    "named, may", [("cpu", False), ("cpu,cuda", False), ("cuda,cpu", True), ("tpu", True)]
)
def test_jax_platforms_decide_if_a_chip_is_possible(named, may):
    assert choice.may_have_accelerator(named) == may
    assert choice.may_have_accelerator() == (choice.jax.config.jax_platforms != "cpu")


@pytest.fixture
def on_a_cpu():
    return {"platform": "cpu", "kind": "a double", "driver": "", "jax": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "double, operation, kind, message",
    [
        ("right", "token_logprobs", "right", "3 cases"),
        ("correct_mosaic_tpu_invariant", "token_logprobs", "right", "3 cases"),
        ("planted_mosaic_tpu_invariant", "token_logprobs", "wrong", "case padded_head: logp: rel"),
        ("wrong_in_one_tile", "grouped_matmul", "wrong", "case ragged_groups: out: relative error"),
        ("wrong_in_one_tile", "token_logprobs", "wrong", "case padded_head: logp: relative error"),
        ("wrong_in_one_tile", "decode_attention", "wrong", "case uneven: o: relative error"),
        ("wrong_gradient", "sink_attention", "wrong", "case ragged: dk: relative error"),
        ("other_bits_in_each_call", "token_logprobs", "wrong", "logp has different bits in two"),
        ("crashes", "token_logprobs", "wrong", "the process was killed by SIGABRT"),
        ("refuses", "token_logprobs", "refuses", "it needs a Hopper GPU"),
        ("has_no_memory", "decode_attention", "unknown", "ran out of memory"),
        ("names_the_status_of_no_memory", "token_logprobs", "wrong", "it raised ValueError"),
    ],
)
def test_another_process_finds_a_planted_fault(
    tmp_path, on_a_cpu, double, operation, kind, message
):
    judge = make_judge(
        on_a_cpu, "float32", {}, folder=tmp_path, timeout_s=300.0, log_line=lambda _: None
    )
    verdict = judge(operation, f"{DOUBLES}:{double}")
    assert verdict.kind == kind and message in verdict.reason and "\n" not in verdict.reason
    assert len(list(tmp_path.glob("*.json"))) == (kind != "unknown")


@pytest.mark.slow
def test_a_hang_costs_its_timeout_once(tmp_path, on_a_cpu):
    printed = []
    judge = make_judge(
        on_a_cpu, "float32", {}, folder=tmp_path, timeout_s=20.0, log_line=printed.append
    )
    for _ in range(2):
        start = time.monotonic()
        verdict = judge("token_logprobs", f"{DOUBLES}:hangs")
        elapsed_s = time.monotonic() - start
        assert verdict == ("wrong", "case padded_head: the process gave no result in 20 s")
    assert elapsed_s < 1 and printed == [
        f"checking token_logprobs with {DOUBLES}:hangs on a double…"
    ]


@pytest.mark.slow
def test_sampled_rows_show_faults_at_run_size(on_a_cpu, tmp_path):
    real = {"token_logprobs": [dict(name="run", M=1500, D=64, V=640, vocab_size=600)]}
    verdicts = {
        double: make_judge(
            on_a_cpu, "float32", real, folder=tmp_path, timeout_s=300.0, log_line=lambda _: None
        )("token_logprobs", f"{DOUBLES}:{double}")
        for double in ("right", "wrong_past_the_cases")
    }
    assert verdicts["right"] == ("right", "4 cases")
    assert verdicts["wrong_past_the_cases"].reason.startswith("case run: logp: relative error")


def test_experts_are_checked_by_their_product(monkeypatch):
    monkeypatch.setitem(cases.HARD_CASES, "grouped_matmul", ())
    checked, find_fault = [], one.find_fault

    def record(op, case, *args):
        checked.append((op, case))
        return find_fault(op, case, *args)

    monkeypatch.setattr(one, "find_fault", record)
    case = MatmulCase("run", 70, 64, 128, (30, 0, 40))
    names = "grouped_matmul", "grouped_matmul_mxfp4", "grouped_matmul_rounded"
    real = json.loads(json.dumps([case._asdict() | {"op": name} for name in names]))
    messages = list(one.check_cases("grouped_matmul", "xla", "float32", real))
    assert checked == [(OPS[name], case) for name in names]
    assert [x["fault"] for x in messages if "case" in x] == [None] * 3


def test_a_verdict_has_no_advice_for_direct_calls(monkeypatch):
    monkeypatch.setitem(cases.HARD_CASES, "grouped_matmul", ())
    real = [MatmulCase("run", 70, 64, 128, (30, 0, 40))._asdict()]
    messages = list(one.check_cases("grouped_matmul", "mosaic_gpu", "float32", real))
    assert messages[-1]["refused"] == "it needs gpu, this is cpu"


def test_a_check_does_not_tune_the_reference():
    flag = "--xla_gpu_autotune_level"
    assert child.child_environ({"PATH": "/bin"})["XLA_FLAGS"] == f"{flag}=0"
    flags = child.child_environ({"XLA_FLAGS": "--xla_dump_to=d"})["XLA_FLAGS"]
    assert flags == f"--xla_dump_to=d {flag}=0"
    assert child.child_environ({"XLA_FLAGS": f"{flag}=4"})["XLA_FLAGS"] == f"{flag}=4"


def test_a_device_that_fails_gives_no_verdict(monkeypatch):
    for end in ("was killed by SIGSEGV (TPU is in use)", ""):
        monkeypatch.setattr(child, "run_child", lambda *_, end=end: child.ChildReport((), end))
        with pytest.raises(child.NoChip, match="opens the device (was killed|said nothing)"):
            child.check_kernel("sink_attention", "mosaic_gpu", "bfloat16", None, 1.0)
        with pytest.raises(child.NoChip):
            child.find_chip()


def test_the_runs_shape_must_be_supported(monkeypatch):
    def verdict(*refused, own):
        lines = [
            {"case": str(i), "fault": None, "refused": r, "own": i >= len(refused) - own}
            for i, r in enumerate(refused)
        ]
        monkeypatch.setattr(child, "run_child", lambda *_: child.ChildReport(tuple(lines), ""))
        return child.check_kernel("sink_attention", "mosaic_gpu", "bfloat16", [{"T": 1}] * own, 1.0)

    assert verdict(None, "odd", None, own=1) == ("right", "2 cases")
    assert verdict(None, None, "head size 16", own=1) == ("refuses", "head size 16")
    assert verdict(None, "head size 16", None, own=2) == ("refuses", "head size 16")
    assert verdict(None, None, "odd", own=0) == ("right", "2 cases")
    assert verdict("no", "no", own=0).kind == "refuses"
