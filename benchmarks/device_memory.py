# SPDX-License-Identifier: Apache-2.0
"""What a device holds while adapters are trained over four-bit experts, by the chips' compilers.

    python benchmarks/device_memory.py                         # the table of docs/results/lora.md
    python benchmarks/device_memory.py --chip v6e --tokens 4096 --model 20b step

Nothing is executed. A row compiles the step of RL that train jits, for eight sequences in eight
microbatches, whose rows of the embedding the host gathers; a pass that scores log-probs; the
engine's prefill and decode, which read the whole embedding. Needs
pip install 'jaxmoe[compilers]', and some minutes a row.
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.model import make_ops
from jaxmoe.parallel.sharding import make_one_device_mesh
from jaxmoe.plan.compiled import step_base_shapes
from jaxmoe.plan.kernels import choose_mesh_kernels
from jaxmoe.plan.sampler import compile_sampler
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.rl.update import score_batch
from jaxmoe.run.memory import plan_memory
from jaxmoe.run.programs import batch_shapes, rl_program, warmup_optimizer
from pallas_kernels.ahead_of_time import chip_mesh, compile_on

EMBEDDING_ROWS = 16_384  # as configs/gptoss20b_lora.py has it
MODELS = {"20b": "gpt_oss_20b", "120b": "gpt_oss_120b"}


class Row(NamedTuple):
    """What is compiled."""

    chip: str
    model: str
    tokens: int
    rank: int = 4
    chunk: int = 1024
    inputs: str = "host"  # of periods of layers, or "device"


TABLE = (
    *(Row("h100", "20b", n) for n in (4096, 8192, 24576, 131_072)),
    Row("h100", "120b", 4096),
    Row("v6e", "20b", 4096),
    Row("v5e", "20b", 4096),
)


def config(row: Row) -> Config:
    """A run of these sizes on one device."""
    import jaxmoe.model.config as models

    cfg = replace(load_config("gptoss20b.py"), model=getattr(models, MODELS[row.model])())
    prompt = row.tokens // 4
    return override(
        cfg,
        "mesh.fsdp=1",
        "mesh.expert=1",
        f"lora.attention_rank={row.rank}",
        f"lora.expert_rank={row.rank}",
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={row.tokens - prompt}",
        "optim.tokens_per_microbatch=0",
        "optim.microbatches=8",
        "rollout.sequences_per_step=8",
        "rollout.samples_per_prompt=8",
        "optim.remat=True",
        f"optim.remat_inputs={row.inputs}",
        f"optim.expert_tokens={row.chunk}",
        f"lora.embedding_rows={EMBEDDING_ROWS}",
        "rollout.max_parallel_sequences=8",
    )


def device(chip: str) -> jax.sharding.Mesh:
    """The mesh of one such chip."""
    return make_one_device_mesh(chip_mesh(chip).devices.flat[0])


def lying(mesh: Any, tree: Any) -> Any:
    """Shapes on the mesh's one device, those in the host's memory there."""
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(x: Any) -> Any:
        kind = x.sharding.memory_kind if isinstance(x.sharding, jax.NamedSharding) else None
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=at if kind is None else at.with_memory_kind(kind)
        )

    return jax.tree.map(place, tree)


def step(cfg: Config, chip: str) -> jax.stages.Compiled:
    """The step of RL."""
    mesh = device(chip)
    a, tx = algorithm_from_config(cfg), rl_optimizer(cfg)
    ops = make_ops(cfg, choose_mesh_kernels(cfg, mesh).impls)
    state = stage_shapes(cfg, warmup_optimizer(cfg), tx, mesh)["rl"]
    program = rl_program(cfg, ops, mesh, a, tx, state)
    given = lying(mesh, (state, *batch_shapes(cfg, a), step_base_shapes(cfg)))
    return compile_on(mesh, program.fn, *given, **program.options)


def scoring(cfg: Config, chip: str) -> jax.stages.Compiled:
    """Log-probs of the whole batch, as a step scores them before its first update."""
    mesh, a = device(chip), algorithm_from_config(cfg)
    ops = make_ops(cfg, choose_mesh_kernels(cfg, mesh).impls)
    scorer = Scorer(cfg.model, ops, cfg.rollout.temperature, "none", cfg.lora.scales)
    state = stage_shapes(cfg, warmup_optimizer(cfg), rl_optimizer(cfg), mesh)["rl"]

    def run(params: Any, batch: Any, base: Any) -> Any:
        beside = replace(state, params=params, frozen=replace(state.frozen, base=base))
        return score_batch(
            beside, batch, a, scorer, cfg.optim.microbatches, policy=True
        ).old_logp_BT

    given = lying(mesh, (state.params, batch_shapes(cfg, a)[0], step_base_shapes(cfg)))
    return compile_on(mesh, run, *given)


def sizes(found: jax.stages.Compiled) -> tuple[int, int, int]:
    """Bytes of arguments; of temporaries and results beside them; in the host's memory."""
    m: Any = found.memory_analysis()
    more = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes, more, m.host_temp_size_in_bytes


def decoded(text: str, cfg: Config) -> list[str]:
    """Instructions of a program that make all of a layer's experts' matrices in floats, or a whole
    number of layers'; and those that copy them in four bits."""
    m = cfg.model
    one = m.n_experts * m.d_model * m.d_expert
    return [
        line
        for line, dtype, n, opcode in made(text)
        if n
        and opcode not in ALIASES
        and ((dtype in ("bf16", "f32") and n % one == 0) or (dtype == "u8" and 2 * n % one == 0))
    ]


ALIASES = (
    "parameter",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
    "dynamic-slice",
)


def made(text: str) -> Iterator[tuple[str, str, int, str]]:
    """Of each instruction outside of fusions: its line, dtype, how many numbers, and opcode."""
    inside = False
    for line in text.splitlines():
        if line and not line[0].isspace():  # a computation begins or ends
            inside = line.startswith(("%fused", "fused", "%wrapped", "wrapped"))
        found = re.match(r"\s+(?:ROOT )?\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if found and not inside:
            dims = [int(x) for x in found[2].split(",") if x]
            yield line.strip()[:160], found[1], math.prod(dims), found[3]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--chip")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--inputs", choices=("host", "device"), default="host")
    parser.add_argument("programs", nargs="*", default=["step", "scoring", "sampling"])
    args = parser.parse_args(argv)
    rows = [
        row._replace(rank=args.rank, chunk=args.chunk, inputs=args.inputs)
        for row in TABLE
        if args.chip in (None, row.chip)
        and args.model in (None, row.model)
        and args.tokens in (None, row.tokens)
    ]
    if not rows and args.chip and args.model and args.tokens:
        rows = [Row(args.chip, args.model, args.tokens, args.rank, args.chunk, args.inputs)]
    heads = (
        "chip",
        "model",
        "tokens",
        "program",
        "arguments",
        "temporaries",
        "sum",
        "by the dry run",
        "on the host",
        "CPU-s",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        cfg = config(row)
        for name in args.programs:
            began = time.process_time()
            told = tell(name, cfg, row.chip)
            head = f"{row.chip} | {row.model} | {row.tokens:,} | {name}"
            print(f"| {head} | {told} | {time.process_time() - began:.0f} |", flush=True)


def tell(name: str, cfg: Config, chip: str) -> str:
    """The cells of a program, or why it was refused."""
    if name == "sampling":
        mesh = device(chip)
        wave: Any = compile_sampler(cfg, mesh, choose_mesh_kernels(cfg, mesh).impls)
        if not hasattr(wave, "decode"):
            return f"refused: {gb(wave.needs)} of {gb(wave.there)} | | | |"
        both = f"prefill {gb(wave.prefill)}, decode {gb(wave.decode)}"
        return f"{both} | | {gb(wave.live)} | {gb(plan_memory(cfg).sampling)} | "
    try:
        found = {"step": step, "scoring": scoring}[name](cfg, chip)
    except jax.errors.JaxRuntimeError as error:
        said = re.search(
            r"Used [\d.]+\w of [\d.]+\w hbm|HLO \w+ \([\d.]+\w\) exceeds [^.]*", str(error)
        )
        return f"refused: {said[0] if said else str(error)[:80]} | | | |"
    bad = decoded(found.as_text() or "", cfg)
    assert not bad, "all of a layer's experts in one array:\n" + "\n".join(bad)
    held, more, host = sizes(found)
    mem = plan_memory(cfg)  # the engine's copy is no part of the step
    counted = gb(mem.training - mem.engine_copy) if name == "step" else ""
    return f"{gb(held)} | {gb(more)} | {gb(held + more)} | {counted} | {gb(host)}"


def gb(n: int) -> str:
    return f"{n / 1e9:.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
