# SPDX-License-Identifier: Apache-2.0
"""The command: what it refuses, what it tells, and small runs through chips' own compilers."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

import jaxmoe.plan.__main__ as command
import jaxmoe.plan.nearest as search
from jaxmoe.batches.computed_tokens import count_full_lengths, shared_at_full_lengths
from jaxmoe.batches.sharing_from_config import row_sharing
from jaxmoe.config import MeshConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.model import make_ops
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.weights import base_shapes
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.plan import report
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.collectives import Collective
from jaxmoe.plan.compiled import (
    CompiledStep,
    TooLarge,
    compile_rl_step,
    mesh_on,
    microbatch_tokens,
    parse_too_large,
    step_base_shapes,
)
from jaxmoe.plan.roofline import layer_traffic, sampling_work, step_bounds, step_work
from jaxmoe.plan.sampler import CompiledSampler
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.run.memory import layer_flops, plan_memory
from jaxmoe.run.policy_memory import base_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import CHIPS as COMPILED
from pallas_kernels.ahead_of_time import compiler_unavailable

BIG = load_config("gptoss120b.py")
TINY = ("--config", "tiny.py")


def run(*args):
    return command.main([*TINY, *args])


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(command, "parse_topology", lambda name: ("v5e", [None] * 8))


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (("--topology", "v9:2x2"), "known chips are v5e, v5p"),
        (("--topology", "h200:8"), "(as h200:2x8). Try --topology v5p:4x4x4."),
        (("--topology", "h200:0x8"), "known chips are v5e, v5p"),
    ],
)
def test_an_unknown_machine_is_one_line(args, answer, capsys):
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: --topology must be one that a compiler knows") and answer in err


def test_another_machines_mesh_is_refused_with_advice(eight, capsys):
    assert run("--topology", "v5e:2x4", "--set", "mesh.fsdp=2", "--set", "mesh.tensor=2") == 2
    err = capsys.readouterr().err
    assert "the 8 devices of v5e:2x4; they make 4" in err
    assert err.endswith("Try --set mesh.fsdp=8 --set mesh.tensor=1.\n")
    assert run("--topology", "v5e:2x4", "--set", "mesh.fsdp=8", "--dry-run") == 0
    assert run("--topology", "v5e:2x4", "--set", "mesh.tensor=8") == 2  # as any run would
    assert "must divide model.n_kv_heads" in capsys.readouterr().err


def test_a_mesh_without_torus_is_one_line(eight, monkeypatch, capsys):
    def refuses(cfg, devices):
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr(command, "mesh_on", refuses)
    assert run("--topology", "v5e:2x4", "--set", "mesh.fsdp=8") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: each axis of mesh must be a product of sides of v5e:2x4, got fsd")


def test_without_compilers_it_says_what_to_install(monkeypatch, capsys):
    def absent(*args, **options):
        raise RuntimeError("no libtpu")

    monkeypatch.setattr(ahead_of_time.topologies, "get_topology_desc", absent)
    assert run("--topology", "v5e:2x4") == 2
    assert "Try pip install 'jaxmoe[compilers]'." in capsys.readouterr().err


def test_a_shape_without_slice_has_the_compilers_message(monkeypatch, capsys):
    def refuses(*args, **options):
        raise RuntimeError("INVALID_ARGUMENT: it is not divisible by 2x2x1")

    monkeypatch.setattr(ahead_of_time.topologies, "get_topology_desc", refuses)
    assert run("--topology", "v5e:3x3") == 2
    assert "got 'v5e:3x3': it is not divisible by 2x2x1. Try" in capsys.readouterr().err


def test_every_chip_of_the_compilers_has_figures():
    assert set(CHIPS) == set(COMPILED)
    for chip in CHIPS.values():
        assert chip.memory > 15e9 and chip.flops > 1e14
        assert chip.network < chip.links < chip.memory_bandwidth


def a_step(live, sends=()):
    return CompiledStep(live // 2, live - live // 2, Counter(dict(sends)), 3, 1.0)


@pytest.mark.slow
def test_a_run_that_does_not_fit_gets_advice():
    cfg, gpu = load_config("gptoss20b.py"), CHIPS["h100"]
    mem = plan_memory(cfg)
    compiled = a_step(90 * 10**9)
    of = report.step_fit(cfg, compiled, gpu)
    assert of.missing == 90 * 10**9 + mem.engine_copy - gpu.memory > 0
    text = report.format_fit(cfg, of, True, "typed --x 1", (1.2, 1.0))
    assert text.startswith("does not fit: ") and f"{of.missing / 1e9:.2f} GB too much" in text
    assert ". Try typed --x 1 --set " in text and "which needs about" in text and "\n" not in text
    devices_text = report.format_fit(cfg, report.Fit(1, 31 * 10**9, 30 * 10**9), False, "typed")
    assert "Try 16 devices: --set mesh.fsdp=4 --set optim." in devices_text


def test_a_gpu_share_beyond_three_quarters_is_explained():
    gpu = CHIPS["h100"]
    engine = plan_memory(BIG).engine_copy
    small, large = (
        report.format_fit(
            BIG, report.step_fit(BIG, a_step(int(part * gpu.memory) - engine), gpu), True, "typed"
        )
        for part in (0.5, 0.8)
    )
    assert small.startswith("fits") and "FRACTION" not in small
    assert "XLA_CLIENT_MEM_FRACTION=0.82" in large


def test_libtpu_that_finds_no_place_is_read():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
        "space hbm. Used 22.88G of 15.75G hbm. Exceeded hbm capacity by 7.13G."
    )
    parsed = parse_too_large(message, 10**9, 2.0)
    assert parsed == TooLarge(round(22.88 * 2**30), round(15.75 * 2**30), 2.0)
    part = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (46.48G) exceeds available HBM (31.24G). HLO module: jit."
    )
    parsed_part = parse_too_large(part, 10**9, 2.0)
    assert parsed_part == TooLarge(round(46.48 * 2**30) + 10**9, round(31.24 * 2**30), 2.0)
    assert parse_too_large("INTERNAL: something else", 0, 2.0) is None
    lines = list(report.memory_lines(BIG, parsed, report.step_fit(BIG, parsed, CHIPS["v5e"])))
    assert any(line.split()[:2] == ["step", "24.57"] for line in lines)


@pytest.mark.slow
def test_a_compiled_step_tells_its_bytes():
    small = ("model.d_model=32", "model.d_expert=24", "model.n_layers=2", "model.n_experts=4")
    cfg = override(load_config("tiny.py"), *small, "rollout.sequences_per_step=16")
    with jax.numpy_dtype_promotion("standard"):
        step = compile_rl_step(cfg, mesh_on(cfg, jax.devices()[:1]), {})
    assert isinstance(step, CompiledStep) and step.live == step.arguments + step.temporaries
    mem = plan_memory(cfg)
    assert 1.0 < step.arguments / (mem.weights + mem.optimizer) < 1.1  # the batch
    assert (step.temporaries > 0, step.host, step.kernels) == (True, 0, 0)
    assert not step.collectives and not step.tpu_kernels


def test_work_is_of_the_layers_and_the_head():
    cfg = override(BIG, "optim.remat=False", "optim.tokens_per_microbatch=0")
    m, work = cfg.model, step_work(cfg, algorithm_from_config(cfg))
    flops, head = layer_flops(cfg), 2 * cfg.context * m.d_model * m.padded_vocab
    share = cfg.rollout.sequences_per_step / 64
    forward = flops.linear + flops.attention + head
    assert work.useful == 3 * forward * share
    assert work.flops == pytest.approx(work.useful + share * (flops.attention / 2 + head))
    recomputed = step_work(override(cfg, "optim.remat=True"), algorithm_from_config(cfg))
    extra_flops = recomputed.flops - work.flops
    assert extra_flops == pytest.approx(share * (flops.linear + flops.attention))
    kl = override(cfg, "loss.kl_coef=0.1")
    assert step_work(kl, algorithm_from_config(kl)).flops - work.flops == pytest.approx(
        share * forward
    )
    scored = override(cfg, "loss.old_logp=recomputed", "loss.epochs=2")
    twice = step_work(scored, algorithm_from_config(scored))
    assert twice.flops == pytest.approx(2 * work.flops + share * forward)
    packed = count_full_lengths(BIG, None)
    assert packed.updates.microbatches == cfg.rollout.sequences_per_step // 64


def visible_pairs(prompt, answer, samples, window):
    """Pairs of a query and a key that it sees, in a row of a group."""
    positions = [np.arange(prompt - 1), *samples * [np.arange(prompt - 1, prompt + answer)]]
    owner = np.repeat(np.arange(samples + 1), [len(x) for x in positions])
    positions_T = np.concatenate(positions)
    distance = positions_T[:, None] - positions_T
    sees = (owner == 0) | (owner[:, None] == owner)
    return int((sees & (distance >= 0) & (distance < window)).sum())


def test_the_work_of_shared_prompts_is_counted_once():
    cfg = override(
        BIG,
        "optim.remat=False",
        "optim.tokens_per_microbatch=0",
        "data.max_prompt_tokens=1024",
        "rollout.max_new_tokens=512",
    )
    a, m = algorithm_from_config(cfg), cfg.model
    sharing = shared_at_full_lengths(cfg, make_ops(cfg).attend)
    work, today = step_work(cfg, a, sharing), step_work(cfg, a)
    group = 1023 + 8 * 513
    pairs = sum(visible_pairs(1024, 512, 8, window) for window in (1536, m.sliding_window))
    attention = m.n_layers // 2 * 4 * m.n_q_heads * m.head_dim * pairs
    linear = layer_flops(cfg, group).linear + 2 * group * m.d_model * m.padded_vocab
    assert work.useful == pytest.approx(3 * 128 * (linear + attention) / 64)  # 128 groups
    assert 0.41 < work.useful / today.useful < 0.43
    assert microbatch_tokens(cfg, sharing) == 2 * group  # of a device's 16 sequences
    assert microbatch_tokens(cfg) == 16 * 1536
    arrays = [layer_traffic(cfg, n) for n in (16 * 1536, 2 * group)]
    assert today.traffic - work.traffic == pytest.approx(3 * (arrays[0] - arrays[1]))


@pytest.mark.parametrize("name", ["tiny.py", "tiny_tool.py", "tiny_if.py", "gptoss20b.py"])
@pytest.mark.parametrize(
    "changes", [(), ("mesh.sequence=2", "mesh.attention=zigzag"), ("mesh.data=2", "mesh.fsdp=1")]
)
def test_shared_rows_hold_no_more_than_planned(name, changes):
    cfg = override(load_config(name), *changes)
    assert microbatch_tokens(cfg, row_sharing(cfg)) <= microbatch_tokens(cfg)


def test_the_slowest_bounds_a_step():
    chip, work = CHIPS["h200"], step_work(BIG, algorithm_from_config(BIG))
    collective = Collective("all-gather", 1e9, (tuple(range(16)),))
    bounds = step_bounds(work, {collective: 100}, chip, [i // 8 for i in range(16)])
    assert bounds.links == pytest.approx(100 * 15e9 / chip.links)
    assert bounds.network == pytest.approx(100 * 1e9 / chip.network)
    assert bounds.arithmetic == work.flops / chip.flops
    assert bounds.step == max(dataclasses.astuple(bounds)) and bounds.limit == "links"
    assert step_bounds(work, {collective: 100}, CHIPS["v5p"], [0] * 16).network == 0.0


def test_a_state_beyond_the_chip_needs_no_compiler(monkeypatch, capsys):
    def fail_to_compile(*args):
        raise AssertionError("nothing is compiled")

    chips = {"v5e": CHIPS["v5e"]._replace(memory=5 * 10**6)}
    monkeypatch.setattr(search, "MAX_DEVICES", 4)
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    monkeypatch.setattr(command, "parse_topology", lambda name: ("v5e", [None] * 2))
    monkeypatch.setattr(command, "mesh_on", lambda cfg, devices: mesh)
    monkeypatch.setattr(command, "compile_rl_step", fail_to_compile)
    monkeypatch.setattr(command, "CHIPS", chips)
    assert run("--topology", "v5e:1x2", "--set", "mesh.fsdp=2") == 1
    out = capsys.readouterr().out
    assert "the state takes 6.01 MB and the engine's weights" in out
    assert "\ndoes not fit: 3.21 MB too much. Try " in out


def test_a_wave_and_the_step_make_the_whole():
    cfg = override(BIG, "data.max_prompt_tokens=512", "rollout.max_new_tokens=1024")
    chip, collective = CHIPS["v5p"], Collective("all-gather", 1e6, (tuple(range(64)),))
    wave = CompiledSampler(
        64, 10**9, 2 * 10**9, Counter({collective: 2}), Counter({collective: 1}), 1.0
    )
    before, token = sampling_work(cfg, wave.prompts)
    head = 2 * cfg.model.d_model * cfg.model.padded_vocab
    layers = sum(vars(layer_flops(cfg)).values())
    answers = token.flops * 1024 + before.flops * 8  # each answer's own prompt
    assert answers == pytest.approx(64 * 8 / 64 * (layers + 1024 * head))
    bounds_of_each = [
        step_bounds(x, t, chip, [0] * 64)
        for x, t in ((before, wave.prefill_collectives), (token, wave.token_collectives))
    ]
    assert bounds_of_each[1].links == pytest.approx(63e6 / chip.links)
    work = step_work(cfg, algorithm_from_config(cfg))
    bounds = step_bounds(work, {}, chip, [0] * 64)
    text = "\n".join(report.sampling_lines(cfg, wave, *bounds_of_each, work, bounds, chip))
    seconds = 2 * (
        bounds_of_each[0].step + 1024 * bounds_of_each[1].step
    )  # 1,024 sequences, 512 at once
    assert f"{seconds:.3g} s of sampling + {bounds.step:.3g} s of training" in text
    assert report.sampler_fit(cfg, wave, chip).step == 2 * 10**9


def test_a_decoded_token_reads_experts_and_present_keys():
    cfg = override(BIG, "data.max_prompt_tokens=512", "rollout.max_new_tokens=2048")
    few, many_prompts = (sampling_work(cfg, prompts)[1].traffic for prompts in (64, 64 * 1000))
    longer = sampling_work(override(cfg, "rollout.max_new_tokens=5120"), 64)[1].traffic
    assert longer - few == 8 * (cache_bytes(cfg.model, 1, 3072) - cache_bytes(cfg.model, 1, 1536))
    weights = plan_memory(cfg).engine_copy
    assert few < weights + 8 * cache_bytes(cfg.model, 1, 1536) < many_prompts
    assert sampling_work(cfg, 1)[1].traffic < 0.6 * weights  # 8 rows ask for 28 of 128 experts


def test_adapters_need_no_gradient_of_their_base():
    """A frozen matrix is multiplied twice a token, and once more where it is recomputed."""
    cfg = override(
        load_config("gptoss20b_long.py"), "optim.remat=False", "optim.remat_inputs=device"
    )
    flops, m = layer_flops(cfg), cfg.model
    head = 2 * cfg.context * m.d_model * m.padded_vocab
    work = step_work(cfg, algorithm_from_config(cfg))
    sequences = cfg.rollout.sequences_per_step
    assert work.useful == sequences * (2 * flops.linear + 3 * flops.attention + 2 * head)
    # attention's backward repeats half of its forward, that of the log-probs all of it
    extra = sequences * (flops.attention // 2 + head)
    assert work.flops - work.useful == pytest.approx(extra)


def test_decoding_reads_four_bits_of_a_frozen_base():
    cfg = load_config("gptoss20b_long.py")
    _, token = sampling_work(cfg, 16)
    experts, others, _ = base_bytes(cfg)
    m, rows = cfg.model, 16 * cfg.rollout.samples_per_prompt
    # a prompt's keys are read once for all of its samples, where layers are full
    stored = 16 * cfg.data.max_prompt_tokens + rows * cfg.rollout.max_new_tokens // 2
    keys = 2 * m.n_layers * m.n_kv_heads * m.head_dim * (stored + rows * m.sliding_window)
    assert token.traffic == pytest.approx(experts + others + keys, rel=0.01)


@pytest.mark.aot
@pytest.mark.slow  # a minute each: the whole step
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", ["h200:1x8", "v5e:2x4"])
@pytest.mark.parametrize("at", ["device", "host"])
def test_a_small_step_compiles_for_eight_chips(topology, at, capsys):
    if reason := compiler_unavailable(topology.partition(":")[0]):
        pytest.skip(reason)
    small = [
        "rollout.sequences_per_step=16",
        "mesh.fsdp=4",
        "mesh.expert=2",
        "kernels=xla",
        "optim.remat=True",
        f"optim.remat_inputs={at}",
        f"optim.moments={at}",
    ]
    with jax.numpy_dtype_promotion("standard"):
        code = run("--topology", topology, *(x for one in small for x in ("--set", one)))
    out, lines = capsys.readouterr().out, {}
    assert code == 0 and "\nfits " in out
    for line in out.splitlines():
        lines.setdefault(line.split()[0] if line.strip() else "", line.split())
    assert 0.85 < float(lines["arguments"][-1]) < 1.3  # the batch, and what tiles pad
    assert 0.5 < float(lines["step"][-1]) < 2.0
    assert ("on" in lines) == (at == "host")
    assert {"all-gather", "reduce-scatter", "prefill", "decode"} <= lines.keys()
    assert " s of sampling + " in out


def test_a_step_of_adapters_gets_its_embedding_rows():
    cfg = override(load_config("tiny_lora.py"), "lora.embedding_rows=48")
    table, embedding = (base["embed"] for base in (base_shapes(cfg), step_base_shapes(cfg)))
    rows = 48, cfg.model.d_model
    assert embedding.rows_RD.shape == rows and embedding.rows_RD.dtype == table.dtype
    assert embedding.shape == table.shape and embedding.ids_R.shape == (48,)
    assert step_base_shapes(override(cfg, "lora.embedding_rows=0")) == base_shapes(cfg)
    assert step_base_shapes(load_config("tiny.py")) is None
