# SPDX-License-Identifier: Apache-2.0
"""What a device of several holds, and whether long rows come out right; on 8 CPU devices.

    python benchmarks/parallel.py attention           # compiles forward and backward
    python benchmarks/parallel.py attention --run     # runs them too: minutes
    python benchmarks/parallel.py step                # compiles whole steps of RL
    python benchmarks/parallel.py scaling             # compiles steps for 8 to 256 devices

Temporaries are XLA's own count, of one device, for one row of small heads. `--run` compares 64
sampled queries, and what they give to the gradient of every key, with the formula in float64.
`step` divides the temporaries of a device of eight by those of one, whose batch is the same.
`scaling`: bytes a device sends for each of its tokens of a step of RL, as many on every device,
read from programs for CPU devices, or with `--on h200` for GPUs that are not here, which takes long
and the compilers (pip install 'jaxmoe[compilers]').
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "256" if "scaling" in sys.argv else "8"
# eight devices on few cores keep each other waiting
os.environ["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.model import init_params, plain_ops
from jaxmoe.parallel import attention as mesh_attention
from jaxmoe.parallel import expert
from jaxmoe.parallel.halo import halo_attention
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.ring import ring_attention
from jaxmoe.parallel.sequence import unzigzag, zigzag
from jaxmoe.parallel.sharding import (
    batch_sharding,
    make_mesh,
    sharded_shapes,
    state_shardings,
)
from jaxmoe.parallel.ulysses import ulysses_attention
from jaxmoe.plan.collectives import sent_bytes
from jaxmoe.plan.compiled import CompiledStep, compile_rl_step, mesh_on
from jaxmoe.plan.kernels import choose_mesh_kernels
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import jit_step
from pallas_kernels import sink_attention
from pallas_kernels.ahead_of_time import parse_topology
from pallas_kernels.check.sampled import sample_stripes
from tests.jaxmoe.parallel.attention_on_devices import sequence_parallel
from tests.jaxmoe.parallel.test_mesh_step import CFG, TX, make_batch

SHARDS = 8
PLACES = "q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS"
MESH = Mesh(np.array(jax.devices()[:SHARDS]), ("sequence",))
ATTEND = {
    "one device": sink_attention,
    "ring": sequence_parallel(ring_attention, MESH),
    "ring, zigzag": sequence_parallel(ring_attention, MESH),
    "ulysses": sequence_parallel(ulysses_attention, MESH),
    "halo": sequence_parallel(halo_attention, MESH),
}


def gradients(name: str, window: int | None, ct: Any, inputs: Any, places: Any) -> Any:
    """o, lse and the gradients of q, k, v and the sinks."""
    where = dict(zip(PLACES, (places[0], places[0], places[1], places[1]), strict=True))
    out, pull = jax.vjp(lambda *x: ATTEND[name](*x, window=window, **where), *inputs)
    return *out, *pull(ct)


def arrays(T: int, N: int, K: int, H: int) -> Any:
    """Cotangents 0 outside the sampled rows; inputs; positions and segments of two episodes."""
    dice = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(dice.normal(size=(1, T, n, H)), jnp.float32) for n in (N, K, K, N))
    sampled = np.zeros((1, T, 1), bool)
    sampled[0, sample_stripes(T, 64)] = True
    dlse = jnp.where(sampled, jnp.asarray(dice.normal(size=(1, T, N)), jnp.float32), 0.0)
    time_T = np.arange(T)
    cut = T * 5 // 8
    places = (np.where(time_T < cut, time_T, time_T - cut), 1 + (time_T >= cut))
    places = tuple(jnp.asarray(x[None], jnp.int32) for x in places)
    sink_N = jnp.asarray(dice.normal(size=N), jnp.float32)
    return (jnp.where(sampled[..., None], do, 0.0), dlse), (q, k, v, sink_N), places


def exact(T: int, window: int | None, ct: Any, inputs: Any, places: Any) -> Any:
    """As `gradients`, o, lse and dq of the sampled rows alone, in float64."""
    at = sample_stripes(T, 64)
    do, dlse = (np.asarray(x[0, at], np.float64) for x in ct)
    q, k, v, sink = (np.asarray(x, np.float64) for x in inputs)
    q, k, v = q[0, at], *(np.repeat(x[0], q.shape[2] // k.shape[2], axis=1) for x in (k, v))
    positions, segments = (np.asarray(x[0]) for x in places)
    back = positions[at, None] - positions[None]
    seen = (segments[at, None] == segments[None]) & (back >= 0) & (back < (window or T))
    scale = q.shape[2] ** -0.5
    z = np.where(seen[:, None], np.einsum("tnh,snh->tns", q, k) * scale, -np.inf)
    top = np.maximum(z.max(2), sink)
    lse = top + np.log(np.exp(z - top[..., None]).sum(2) + np.exp(sink - top))
    p = np.exp(z - lse[..., None])
    o = np.einsum("tns,snh->tnh", p, v)
    delta = (do * o).sum(2) - dlse
    dz = p * (np.einsum("tnh,snh->tns", do, v) - delta[..., None]) * scale

    def per_key_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(T, inputs[1].shape[2], -1, x.shape[2]).sum(2)

    dk = per_key_head(np.einsum("tns,tnh->snh", dz, q))
    dv = per_key_head(np.einsum("tns,tnh->snh", p, do))
    dsink = -(np.exp(sink - lse) * delta).sum(0)
    return o, lse, np.einsum("tns,snh->tnh", dz, k), dk, dv, dsink


def attention(args: argparse.Namespace) -> None:
    print(
        f"{args.tokens:,} tokens, {args.heads} query and {args.key_heads} key heads of "
        f"{args.head_size}, float32, {SHARDS} shards\n"
    )
    print(
        "| attention | window | temporaries, MiB a device | of one device's |"
        + " s | largest errors of o, lse, dq, dk, dv, dsink |" * args.run
    )
    print("|---" * (4 + 2 * args.run) + "|")
    for window in (None, 128):
        alone = None
        for name in ATTEND:
            if (name == "halo" and window is None) or (name == "ring" and window):
                continue
            if args.only not in (None, name) and name != "one device":
                continue
            sizes = args.tokens, args.heads, args.key_heads, args.head_size
            shapes = jax.eval_shape(partial(arrays, *sizes))
            if name != "one device":
                cut = NamedSharding(MESH, P(None, "sequence"))
                shapes = jax.tree.map(
                    lambda x, cut=cut: (
                        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) if x.ndim > 1 else x
                    ),
                    shapes,
                )
            step = jax.jit(partial(gradients, name, window)).lower(*shapes).compile()
            memory: Any = step.memory_analysis()
            held = memory.temp_size_in_bytes
            alone = alone or held
            cells = [name, window or "", f"{held / 2**20:.1f}", f"{held / alone:.2f}"]
            if args.run and args.only in (None, name):
                cells += run(step, shapes, name, window, sizes)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def run(step: Any, shapes: Any, name: str, window: int | None, sizes: Any) -> list[str]:
    """Seconds, and the largest error of each result as a share of its largest number."""
    given = arrays(*sizes)
    right = exact(sizes[0], window, *given)
    turn = partial(zigzag, shards=SHARDS) if "zigzag" in name else lambda x: x
    back = partial(unzigzag, shards=SHARDS) if "zigzag" in name else lambda x: x
    given = jax.tree.map(lambda x: turn(x) if x.ndim > 1 else x, given)
    given = jax.tree.map(
        lambda x, at: jax.device_put(x, at.sharding) if at.sharding else x, given, shapes
    )
    start = time.time()
    found = jax.block_until_ready(step(*given))
    seconds = time.time() - start
    rows, errors = sample_stripes(sizes[0], 64), []
    for i, (x, want) in enumerate(zip(found, right, strict=True)):
        x = np.asarray(back(x) if x.ndim > 1 else x, np.float64)
        x = x[0, rows] if i < 3 else x[0] if x.ndim > 1 else x
        errors.append(f"{np.abs(x - want).max() / np.abs(want).max():.1e}")
    return [f"{seconds:.0f}", " ".join(errors)]


def compile_step(sizes: Any, rows: int = 8, length: int = 1600) -> Any:
    """The compiled step of eight layers on that many tokens; nothing is made."""
    cfg, mesh = replace(CFG, n_layers=8), make_mesh(MeshConfig(**sizes))
    ops = sharded_ops(replace(plain_ops(), remat=jax.checkpoint), mesh, cfg)
    state = jax.eval_shape(lambda: init_state(Trained(init_params(jax.random.key(0), cfg)), TX))
    pins: dict[str, Any] = {}
    if mesh is not None:
        pins = {"out_shardings": (state_shardings(state, cfg, mesh), None, None)}

    def abstract_row(x: Any) -> jax.ShapeDtypeStruct:
        sharded_shape = (rows, length)[: np.ndim(x)]
        sharding_kwargs: Any = (
            {} if mesh is None else {"sharding": batch_sharding(mesh, np.ndim(x))}
        )
        return jax.ShapeDtypeStruct(sharded_shape, x.dtype, **sharding_kwargs)

    batch = jax.tree.map(abstract_row, make_batch(0))
    step = jit_step(tx=TX, algorithm=Algorithm(), scorer=Scorer(cfg, ops), donate_argnums=0, **pins)
    # as on chips, and at real widths: a ring's turns are a loop, and tokens that a CPU gathers more
    # than GATHERED, so that they come in parts
    with (
        patch.object(mesh_attention, "ring_attention", None),
        patch.object(expert, "MAX_GATHERED_BYTES", 2**20),
    ):
        return step.lower(sharded_shapes(state, cfg, mesh), batch).compile()


def step_memory(args: argparse.Namespace) -> None:
    """A row a mesh."""
    print("| mesh | temporaries of a device | of one device's |\n|---|---|---|")

    def temporaries(**sizes: int) -> int:
        memory = compile_step(sizes).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    one = temporaries()
    for axis in ("fsdp", "sequence", "expert", "tensor"):
        found = temporaries(**{axis: 8})
        print(f"| {axis} 8 | {found / 1e6:.1f} MB | {found / one:.3f} |", flush=True)


def scaling(args: argparse.Namespace) -> None:
    """A row a mesh and machine, and the exponent of each mesh's bytes."""
    given = load_config(args.config)
    print(f"{args.config}, {args.tokens:,} tokens a device and step, {args.on}: bytes it sends\n")
    print("| mesh | devices | a token | of it to other hosts | by kind |\n|---|---|---|---|---|")
    for axes in args.mesh.split(","):
        points = []
        for n in (int(x) for x in args.devices.split(",")):
            sizes = mesh_sizes(axes, n)
            if given.model.d_model % sizes["fsdp"]:  # more of it would cut no weight
                continue
            cfg = override(
                given,
                *(f"mesh.{name}={size}" for name, size in sizes.items()),
                f"data.max_prompt_tokens={args.tokens // 2}",
                f"rollout.max_new_tokens={args.tokens // 2}",
                f"rollout.sequences_per_step={n}",
                "optim.tokens_per_microbatch=0",
                "optim.microbatches=1",
            )
            here = args.on == "cpu"
            devices = jax.devices()[:n] if here else parse_topology(f"{args.on}:{n // 8}x8")[1]
            mesh = mesh_on(cfg, devices)
            step = compile_rl_step(cfg, mesh, {} if here else choose_mesh_kernels(cfg, mesh).impls)
            assert isinstance(step, CompiledStep), "only libtpu refuses a size"
            hosts, kinds = [i // 8 for i in range(n)], dict[str, float]()
            for one, times in step.collectives.items():
                kinds[one.kind] = kinds.get(one.kind, 0) + one.sent_bytes * times / args.tokens
            outside = sum(x.to_other_hosts(hosts) * k for x, k in step.collectives.items())
            told = ", ".join(f"{name} {value:,.0f}" for name, value in sorted(kinds.items()))
            points.append((n, sent_bytes(step.collectives) / args.tokens))
            shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            cells = [shape, n, f"{points[-1][1]:,.0f}", f"{outside / args.tokens:,.0f}", told]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        x, y = np.log(np.array(points)).T
        slope = np.polyfit(x, y, 1)[0] if len(points) > 1 else float("nan")
        print(f"\n{axes}: bytes a token ~ devices^{slope:.3f}\n", flush=True)


def mesh_sizes(axes: str, devices: int) -> dict[str, int]:
    """fsdp: all of it; fsdp8: the rest is data; expert8: the rest is fsdp."""
    name = axes.rstrip("0123456789")
    size = int(axes[len(name) :] or devices)
    rest = "data" if name == "fsdp" else "fsdp"
    return {"data": 1, "fsdp": 1, "expert": 1, name: size, rest: devices // size}


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("attention")
    command.set_defaults(run_command=attention)
    command.add_argument("--tokens", type=int, default=131_072)
    command.add_argument("--heads", type=int, default=8)
    command.add_argument("--key-heads", type=int, default=2)
    command.add_argument("--head-size", type=int, default=16)
    command.add_argument("--run", action="store_true")
    command.add_argument(
        "--only", choices=list(ATTEND), help="compare this one alone with one device"
    )
    commands.add_parser("step").set_defaults(run_command=step_memory)
    command = commands.add_parser("scaling")
    command.set_defaults(run_command=scaling)
    command.add_argument("--on", default="cpu", help="or a GPU, as h200")
    command.add_argument("--config", default="tiny.py")
    command.add_argument("--tokens", type=int, default=64, help="of a device")
    command.add_argument("--devices", default="8,16,32,64,128,256")
    command.add_argument("--mesh", default="fsdp,fsdp8,expert8", help="as mesh_sizes has it")
    args = parser.parse_args()
    args.run_command(args)


if __name__ == "__main__":
    main()
