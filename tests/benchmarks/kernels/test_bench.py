# SPDX-License-Identifier: Apache-2.0
"""The bench: correctness before speed, one line of JSON, exponents that are exponents."""

import json
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import kernel_peers
from benchmarks.kernels import __main__ as bench
from benchmarks.kernels import compiled, growth
from pallas_kernels.ahead_of_time import Ptxas, chip_mesh, compile_on, compiler_unavailable
from pallas_kernels.bench import measure
from pallas_kernels.bench.ops import OPS, make_cotangents, relative_error


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "measure_anchors", lambda *_: measure.Anchors(0.1, 4.0))
    monkeypatch.setattr(measure, "MIN_TIMED_S", 0.0)
    monkeypatch.setattr(bench, "BASELINES", tmp_path)


def run(capsys, *argv):
    assert bench.main([*argv, "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    return printed, json.loads(printed.splitlines()[-1])


CASES = {
    "sink_attention": "packed",
    "decode_attention": "ring",
    "grouped_matmul": "uneven",
    "grouped_swiglu": "uneven",
    "grouped_matmul_mxfp4": "tiny_decode",
    "grouped_swiglu_mxfp4": "tiny_decode",
    "grouped_matmul_rounded": "tiny_decode",
    "grouped_swiglu_rounded": "tiny_decode",
    "grouped_matmul_low_rank": "tiny_decode",
    "grouped_swiglu_low_rank": "tiny_decode",
    "token_logprobs": "padded_head",
}


@pytest.mark.parametrize(  # packed weights go the ways of whole ones
    "op",
    [
        pytest.param(x, marks=[pytest.mark.slow] * x.endswith(("mxfp4", "rounded", "rank")))
        for x in OPS
    ],
)
def test_every_operation_is_checked_and_timed(capsys, op):
    printed, record = run(capsys, op, "--impl", "xla", "--vs", "reference", "--case", CASES[op])
    passes = [row["pass"] for row in record["rows"]]
    assert passes == (["forward", "backward"] if OPS[op].differentiated else ["forward"])
    assert all(row["ms"] > 0 and row["speed"] > 0 and row["tflops"] > 0 for row in record["rows"])
    assert len(record["errors"][CASES[op]]["xla"]) == len(OPS[op].results)
    assert "of matmul" in printed and "largest relative error: xla" in printed


def wrong_window(case, inputs, cotangents):
    case = case._replace(window=case.window + 1)
    return measure.JittedOp(OPS["sink_attention"], case, "xla").passes(inputs, cotangents)


def check_results(op, case, names, dtype="float32"):
    return bench.check_results(op, case, names, jnp.dtype(dtype), bench.load_sides(op, case, names))


def test_a_wrong_result_is_named_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(bench, "time_sides", lambda *_: pytest.fail("timed"))
    with pytest.raises(SystemExit) as stop:
        bench.main(["sink_attention", "--impl", f"{__name__}:wrong_window", "--case", "packed"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert re.search(
        "must be correct to be timed: packed, .*:wrong_window: o: relative error", line
    )


def test_untuned_gpu_products_are_not_timed(monkeypatch, capsys):
    flags = "--xla_cpu_multi_thread_eigen=false --xla_gpu_autotune_level=0"
    assert bench.find_untuned("cpu", flags) is None
    assert bench.find_untuned("gpu", flags.replace("=0", "=4")) is None
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "check_results", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as stop:
        bench.main(["token_logprobs", "--impl", "xla", "--case", "one_block"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "got --xla_gpu_autotune_level=0 in XLA_FLAGS" in line


@pytest.mark.parametrize("name", ["token_logprobs", "decode_attention"])
def test_compiled_ahead_compiles_nothing_in_passes(name, caplog):
    op, dtype = OPS[name], jnp.dtype("float32")
    case = op.cases.TEST_CASES[1]
    inputs = measure.generate_inputs(op, case, dtype, 1)
    ct, jitted = make_cotangents(op, case, inputs, 1), measure.JittedOp(op, case, "xla")
    shapes, ct_shapes = jax.eval_shape(lambda: (inputs, ct))
    with jax.log_compiles():
        jitted.compile(shapes, ct_shapes)
        assert caplog.text.count("Finished XLA compilation") == (3 if op.differentiated else 1)
        caplog.clear()
        jax.block_until_ready([run() for run in jitted.passes(inputs, ct).values()])
    assert "XLA compilation" not in caplog.text


@pytest.mark.aot
def test_the_gpu_compiler_knows_the_tuning_option():
    if reason := compiler_unavailable("h100"):
        pytest.skip(reason)
    mesh = chip_mesh("h100")
    x = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))
    assert compile_on(mesh, jnp.matmul, x, x, compiler_options=measure.UNTUNED)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        compile_on(mesh, jnp.matmul, x, x, compiler_options={"xla_gpu_no_such_option": 0})


@pytest.mark.parametrize("text", ["{", "[]", '{"sink_attention/xla/float32": 3}', "\udcff"])
def test_unreadable_saved_times_are_one_line(monkeypatch, capsys, tmp_path, text):
    path = tmp_path / f"{bench.device_name()}.json"
    path.write_text(text, errors="surrogateescape")
    monkeypatch.setattr(bench, "check_results", lambda *_: pytest.fail("run"))
    with pytest.raises(SystemExit) as stop:
        bench.main(["token_logprobs", "--impl", "xla", "--case", "one_block"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and f"{path} must contain times written by --save" in line


def test_times_are_compared_with_the_saved_ones(capsys):
    argv = ("token_logprobs", "--impl", "xla", "--vs", "reference", "--case", "one_block")
    printed, _ = run(capsys, *argv, "--save")
    assert not printed.splitlines()[-2].endswith("×")
    printed, _ = run(capsys, *argv)
    assert printed.splitlines()[-2].endswith("×")


@pytest.mark.parametrize(
    "typed, message",
    [
        ("attention", "operation must be one of sink_attention, .*; got 'attention'"),
        ("sink_attention --compile v9", "--compile must be one of v5e, .*; got 'v9'"),
        ("sink_attention --rounds many", "invalid int value: 'many'"),
        ("token_logprobs --case huge", "--case must be one of one_block"),
        (
            "sink_attention --case packed --impl nonsense",
            "--impl must name an implementation that runs on this machine; got",
        ),
        ("sink_attention --case packed --impl mosaic_tpu", "it needs tpu, this is cpu"),
        ("sink_attention --case packed --vs nosuch:fn", "--vs must name.*No module named 'nosuch'"),
        ("sink_attention --case packed --vs json:nosuch", "--vs must name.*no attribute 'nosuch'"),
        ("sink_attention --dtype foo", "--dtype must be one of bfloat16.*got 'foo'"),
        ("sink_attention --dtype int32", "--dtype must be one of bfloat16.*got 'int32'"),
        ("sink_attention --rounds 0", "--rounds must be at least 1; got 0"),
        ("grouped_matmul --growth", "--growth must be of an operation with a length"),
        ("sink_attention --growth --impl nonsense", "got 'nonsense'.*Known: auto"),
        ("sink_attention --growth --impl json:loads", "needs an implementation of this package"),
        ("sink_attention --growth --compile h200", "not allowed with"),
        ("sink_attention --growth --case packed --vs xla", "got --vs, --case. Leave it out"),
        ("sink_attention --compile h200 --rounds 3 --save", "got --rounds, --save. Leave it out"),
    ],
)
def test_impossible_requests_are_one_line(capsys, typed, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(typed.split())
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def never_packed(case, inputs, cotangents):
    raise AssertionError("only its name is read here")


def test_a_refused_case_does_not_stop_timing(capsys, monkeypatch):
    def check(op, case, names, dtype, sides):
        if case.name == "packed":
            raise NotImplementedError("no packing\nwhatsoever")
        return {names[0]: [0.1, None]}

    row = {"pass": "forward"} | dict(ms=1.0, peer_ms=2.0, speed=2.0, tflops=3.0, of_matmul=0.1)
    row |= dict(of_copy=None, temp_mb=None)
    monkeypatch.setattr(bench, "check_results", check)
    monkeypatch.setattr(bench, "time_sides", lambda op, case, *_: [row | {"case": case.name}])
    argv = ("sink_attention", "--impl", "xla", "--vs", f"{__name__}:never_packed", "--case")
    printed, record = run(capsys, *argv, "packed", "--case", "gqa8")
    assert "packed: refused: no packing\n" in printed and record["refused"] == {
        "packed": "no packing"
    }
    assert {row["case"] for row in record["rows"]} == {"gqa8"}
    with pytest.raises(SystemExit) as stop:
        bench.main([*argv, "packed"])
    assert stop.value.code == 2
    assert "never_packed: no packing" in capsys.readouterr().err


@dataclass
class Built:
    kernels: tuple = (Ptxas(registers=168, spills=0, stack=0, shared=2048),)
    mosaic_calls: int = 2
    temp_bytes: int = 3_000_000


def test_a_refused_row_leaves_the_table(capsys, monkeypatch):
    def compile_for(chip, fn, *inputs):
        if inputs[0].shape[1] == 37:
            raise RuntimeError("\nINTERNAL: too big\nwhere")
        return Built()

    monkeypatch.setattr(compiled, "compile_for", compile_for)
    monkeypatch.setattr(bench, "compiler_unavailable", lambda chip: None)
    argv = ["sink_attention", "--compile", "h200", "--case"]
    assert bench.main([*argv, "gqa8", "--case", "packed"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.partition("refused: ")[2] for row in rows] == ["INTERNAL: too big"] * 2 + [""] * 2
    assert "168 above" in rows[2] and "2 above" in rows[2] and "3.0" in rows[2]
    assert bench.main([*argv, "gqa8"]) == 1


def compare_passes(op, case, inputs, runs, missing=0):
    """Compare results of a peer, which has no gradient of so many of the inputs."""
    passes = measure.load_side(op, case, "xla").passes(inputs, make_cotangents(op, case, inputs, 0))
    for part in ("forward", "backward"):
        results, expected = list(runs[part]()), jax.tree.leaves(passes[part]())
        assert len(results) == len(expected) - missing * (part == "backward")
        for a, b in zip(expected, results, strict=False):
            assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize(
    "operation, peer",
    [
        ("token_logprobs", "cross_entropy"),
        pytest.param("grouped_swiglu", "hf_experts", marks=pytest.mark.parity),
    ],
)
def test_a_peer_takes_case_and_inputs(operation, peer):
    if peer == "hf_experts":
        pytest.importorskip("transformers")
    op = OPS[operation]
    case = op.cases.TEST_CASES[0]
    inputs = op.inputs(case, jnp.float32, 0)
    side = measure.load_side(op, case, f"benchmarks.kernel_peers:{peer}")
    compare_passes(op, case, inputs, side.passes(inputs, make_cotangents(op, case, inputs, 0)))


def test_without_a_sink_the_rest_is_the_same():
    op = OPS["sink_attention"]
    case = op.cases.get_attention_case("packed")._replace(sinks="none")
    inputs = op.inputs(case, jnp.float32, 0)
    with_sinks = *inputs[:3], jnp.ones_like(inputs[3]), *inputs[4:]  # which must not count
    cotangents = make_cotangents(op, case, inputs, 0)
    runs = kernel_peers.without_sink(case, with_sinks, cotangents, impl="xla")
    compare_passes(op, case, inputs, runs, missing=1)


def test_exponents_are_fitted_to_the_longer_half():
    lengths = (1, 2, 4, 8, 16)
    assert growth.fit_exponent(lengths, [9.0, 7.0, 4.0**2, 8.0**2, 16.0**2]) == pytest.approx(2.0)

    assert growth.fit_exponent((2, 4), [4.0, 16.0]) == pytest.approx(2.0)


@pytest.mark.slow
def test_windowed_memory_grows_linearly(monkeypatch):
    monkeypatch.setattr(growth, "LENGTHS_ON_A_CPU", (128, 256, 512))
    text = growth.format_growth("xla", jnp.float32, "cpu")
    powers = [float(line.rsplit("^", 1)[1]) for line in text.splitlines() if "memory" in line]
    assert len(powers) == 4 and all(p < 1.2 for p in powers)


@pytest.mark.parametrize("peer", ["cudnn", "cudnn_sink", "tokamax", "without_sink"])
def test_peers_refuse_in_one_line(peer):
    op = OPS["sink_attention"]
    case = op.cases.get_attention_case("gqa8")
    inputs = op.inputs(case, jnp.float32, 0)
    with pytest.raises(NotImplementedError, match="needs gpu.*this is cpu"):
        getattr(kernel_peers, peer)(case, inputs, make_cotangents(op, case, inputs, 0))


def test_relative_errors_ignore_agreeing_infinities_and_nothing_else():
    exact = np.array([-np.inf, 3.0, 4.0])
    assert relative_error([-np.inf, 3.0, 4.0], exact) == 0.0
    assert relative_error([-np.inf, 3.0, 5.0], exact) == pytest.approx(
        (1 / 3) ** 0.5 / (25 / 3) ** 0.5
    )


@pytest.mark.parametrize(
    "ours, right",
    [
        ([np.nan, 1.0], [-np.inf, 1.0]),
        ([7.0, 1.0], [np.nan, 1.0]),
        ([np.inf, 1.0], [-np.inf, 1.0]),
        ([7.0, 1.0], [np.inf, 1.0]),
        ([np.nan, 1.0], [7.0, 1.0]),
        ([np.inf, 1.0], [7.0, 1.0]),
    ],
)
def test_one_sided_infinities_are_infinitely_wrong(ours, right):
    assert relative_error(ours, right) == np.inf
    assert relative_error(right, right) == 0.0


def test_a_reference_that_overflows_excuses_nothing(monkeypatch):
    op = OPS["token_logprobs"]
    real = measure.JittedOp.passes

    def broken(self, inputs, cotangents):
        runs = real(self, inputs, cotangents)
        if jax.config.jax_default_matmul_precision == "highest":  # what is right
            return runs
        return runs | {"forward": lambda: [np.inf * x for x in runs["forward"]()]}

    monkeypatch.setattr(measure.JittedOp, "passes", broken)
    with pytest.raises(bench.WrongResult, match="xla: logp: relative error inf"):
        check_results(op, op.cases.TEST_CASES[0], ("xla", "reference"))


def test_a_swiglu_moves_half_the_columns_out():
    case = OPS["grouped_swiglu"].cases.MatmulCase("x", 7, 3, 8, (2, 4))
    matmul, half = (OPS[op].work(case, 2) for op in ("grouped_matmul", "grouped_swiglu"))
    assert matmul.bytes == 2 * (6 * (3 + 8) + 2 * 3 * 8)
    assert half.bytes == 2 * (6 * (3 + 4) + 2 * 3 * 8)
    assert (half.flops, half.backward_flops) == (matmul.flops, matmul.backward_flops)
