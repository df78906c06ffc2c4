# SPDX-License-Identifier: Apache-2.0
"""The command: what it refuses, what it tells, and small runs through chips' own compilers."""

import dataclasses
from collections import Counter

import jax
import pytest

import jaxmoe.plan.__main__ as command
from jaxmoe.config_file import load, override
from jaxmoe.memory import layer_flops, memory
from jaxmoe.plan import report
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.collectives import Collective
from jaxmoe.plan.compiled import Step, TooLarge, microbatches, too_large
from jaxmoe.plan.roofline import bounds, work
from jaxmoe.rl.from_config import algorithm
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import CHIPS as COMPILED
from pallas_kernels.ahead_of_time import missing

BIG = load("gptoss120b.py")
TINY = ("--config", "tiny.py")


def run(*args):
    return command.main([*TINY, *args])


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(command, "topology_of", lambda name: ("v5e", [None] * 8))


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (("--topology", "v9:2x2"), "it knows v5e, v5p"),
        (("--topology", "h200:8"), "(as h200:2x8). Try --topology v5p:4x4x4."),
        (("--topology", "h200:0x8"), "it knows v5e, v5p"),
    ],
)
def test_an_unknown_machine_is_one_line_and_status_two(args, answer, capsys):
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: --topology must be one that a compiler knows") and answer in err


def test_a_mesh_of_another_machine_is_told_what_to_type(eight, capsys):
    assert run("--topology", "v5e:2x4", "--set", "mesh.fsdp=2", "--set", "mesh.tensor=2") == 2
    err = capsys.readouterr().err
    assert "the 8 devices of v5e:2x4; they make 4" in err
    assert err.endswith("Try --set mesh.fsdp=8 --set mesh.tensor=1.\n")
    assert run("--topology", "v5e:2x4", "--set", "mesh.fsdp=8", "--dry-run") == 0
    assert run("--topology", "v5e:2x4", "--set", "mesh.tensor=8") == 2  # as any run would
    assert "must divide model.n_kv_heads" in capsys.readouterr().err


def test_without_compilers_it_says_what_to_install(monkeypatch, capsys):
    def absent(*args, **options):
        raise RuntimeError("no libtpu")

    monkeypatch.setattr(ahead_of_time.topologies, "get_topology_desc", absent)
    assert run("--topology", "v5e:2x4") == 2
    assert "Try pip install 'jaxmoe[compilers]'." in capsys.readouterr().err


def test_a_shape_that_no_slice_has_is_told_in_the_compilers_words(monkeypatch, capsys):
    def refuses(*args, **options):
        raise RuntimeError("INVALID_ARGUMENT: it is not divisible by 2x2x1")

    monkeypatch.setattr(ahead_of_time.topologies, "get_topology_desc", refuses)
    assert run("--topology", "v5e:3x3") == 2
    assert "got 'v5e:3x3': it is not divisible by 2x2x1. Try" in capsys.readouterr().err


def test_every_chip_that_is_compiled_for_has_its_figures():
    assert set(CHIPS) == set(COMPILED)
    for chip in CHIPS.values():
        assert chip.memory > 15e9 and chip.flops > 1e14
        assert chip.network < chip.links < chip.memory_bandwidth


def a_step(live, sends=()):
    return Step(live // 2, live - live // 2, Counter(dict(sends)), 3, 1.0)


def test_what_does_not_fit_says_the_bytes_that_are_missing_and_what_would(capsys):
    mem, chip = memory(BIG), CHIPS["v5e"]
    found = a_step(mem.training - mem.engine_copy)
    of = report.fit(BIG, found, chip)
    assert of.missing == mem.training - chip.memory > 0
    text = report.verdict(BIG, of, gpu=False)
    assert text.startswith("does not fit: ") and f"{of.missing / 1e9:.2f} GB are missing" in text
    assert "--set optim.remat_keeps" not in text  # it is so
    assert "--set optim.moments=host" in text and "\n" not in text


def test_a_gpu_that_must_give_more_than_three_quarters_says_how():
    gpu = CHIPS["h100"]
    engine = memory(BIG).engine_copy
    small, large = (
        report.verdict(BIG, report.fit(BIG, a_step(int(part * gpu.memory) - engine), gpu), gpu=True)
        for part in (0.5, 0.8)
    )
    assert small.startswith("fits") and "FRACTION" not in small
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.82" in large


def test_libtpu_that_finds_no_place_is_read():
    said = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory " \
           "space hbm. Used 22.88G of 15.75G hbm. Exceeded hbm capacity by 7.13G."  # fmt: skip
    found = too_large(said, 2.0)
    assert found == TooLarge(round(22.88 * 2**30), round(15.75 * 2**30), 2.0)
    assert too_large("INTERNAL: something else", 2.0) is None
    lines = list(report.memory_lines(BIG, found, report.fit(BIG, found, CHIPS["v5e"])))
    assert any(line.split()[:2] == ["step", "24.57"] for line in lines)


def test_what_waits_on_the_host_is_told_beside_the_device():
    cfg = override(BIG, "optim.moments=host")
    found = dataclasses.replace(a_step(10**9), host=memory(BIG).optimizer)
    *_, line = report.memory_lines(cfg, found, report.fit(cfg, found, CHIPS["v5e"]))
    size = f"{memory(BIG).optimizer / 1e9:.2f} GB".split()
    assert line.split() == ["on", "its", "host", *size, *size]
    *_, line = report.memory_lines(BIG, found, report.fit(BIG, found, CHIPS["v5e"]))
    assert "host" not in line


def test_work_is_that_of_the_layers_and_the_head():
    cfg = override(BIG, "optim.remat=False", "optim.tokens_per_microbatch=0")
    m, done = cfg.model, work(cfg, algorithm(cfg))
    flops, head = layer_flops(cfg), 2 * cfg.context * m.d_model * m.padded_vocab
    share = cfg.rollout.sequences_per_step / 64
    forward = flops.linear + flops.attention + head
    assert done.useful == 3 * forward * share
    assert done.flops == pytest.approx(done.useful + share * (flops.attention / 2 + head))
    again = work(override(cfg, "optim.remat=True"), algorithm(cfg))
    more = again.flops - done.flops
    assert more == pytest.approx(share * (flops.linear + flops.attention))
    kl = override(cfg, "loss.kl_coef=0.1")
    assert work(kl, algorithm(kl)).flops - done.flops == pytest.approx(share * forward)
    scored = override(cfg, "loss.old_logp=recomputed", "loss.epochs=2")
    twice = work(scored, algorithm(scored))
    assert twice.flops == pytest.approx(2 * done.flops + share * forward)
    assert microbatches(BIG) == cfg.rollout.sequences_per_step // 64


def test_the_slowest_bounds_a_step():
    chip, done = CHIPS["h200"], work(BIG, algorithm(BIG))
    one = Collective("all-gather", 1e9, (tuple(range(16)),))
    least = bounds(done, {one: 100}, chip, [i // 8 for i in range(16)])
    assert least.links == pytest.approx(100 * 15e9 / chip.links)
    assert least.network == pytest.approx(100 * 1e9 / chip.network)
    assert least.arithmetic == done.flops / chip.flops
    assert least.step == max(dataclasses.astuple(least)) and least.limit == "links"
    assert bounds(done, {one: 100}, CHIPS["v5p"], [0] * 16).network == 0.0


@pytest.mark.aot
@pytest.mark.slow  # a minute each: the whole step
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", ["h200:1x8", "v5e:2x4"])
@pytest.mark.parametrize("at", ["device", "host"])
def test_the_step_of_a_small_run_compiles_for_eight_chips(topology, at, capsys):
    if reason := missing(topology.partition(":")[0]):
        pytest.skip(reason)
    small = ["rollout.sequences_per_step=16", "mesh.fsdp=4", "mesh.expert=2", "kernels=xla",
             "optim.remat=True", f"optim.remat_inputs={at}", f"optim.moments={at}"]  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):
        code = run("--topology", topology, *(x for one in small for x in ("--set", one)))
    out, lines = capsys.readouterr().out, {}
    assert code == 0 and "\nfits " in out
    for line in out.splitlines():
        lines.setdefault(line.split()[0] if line.strip() else "", line.split())
    assert 0.85 < float(lines["arguments"][-1]) < 1.3  # the batch, and what tiles pad
    assert 0.5 < float(lines["step"][-1]) < 2.0
    assert ("on" in lines) == (at == "host")
    assert {"all-gather", "reduce-scatter"} <= lines.keys()
