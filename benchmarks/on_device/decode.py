# SPDX-License-Identifier: Apache-2.0
"""A stage: tokens a second of the native engine over random four-bit experts.

    python -m benchmarks.on_device.decode --model 20b --rows 64 --keys 8192

One prompt is read for all rows, which then sample the same number of tokens. Times are of the
jitted decode loop. `share_of_bandwidth` is over the bytes that a token must read: the weights, of
the experts those that some row chooses under balanced routing, and the keys that rows see, those of
the prompt once.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.on_device.dearest import trace_dearest
from benchmarks.on_device.sizes import lora_config
from benchmarks.on_device.stage import device_alone, report
from benchmarks.on_device.train_step import chip_name, named_impls
from benchmarks.on_device.weights import make_random
from jaxmoe.config import Config
from jaxmoe.config_file import override
from jaxmoe.model import make_engine_ops, make_ops
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.compiled import policy_shapes
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.rollout.native_memory import rows_cache_bytes
from pallas_kernels.ahead_of_time import chip_mesh, compile_jitted


def sampling_config(model: str, rows: int, keys: int, tokens: int, *settings: str) -> Config:
    """A run that samples `tokens` tokens of `rows` answers behind `keys` tokens of prompt."""
    cfg = lora_config(model, keys + tokens, rows, 0, *settings)
    return override(
        cfg,
        f"data.max_prompt_tokens={keys}",
        f"rollout.max_new_tokens={tokens}",
        f"rollout.samples_per_prompt={rows}",
        f"rollout.max_parallel_sequences={rows}",
    )


def make_engine(cfg: Config, platform: str) -> NativeEngine:
    """The engine of the run, with its kernels unchecked."""
    impls, r = named_impls(platform), cfg.rollout
    ops = make_engine_ops(cfg, impls) or make_ops(cfg, impls)
    return NativeEngine(
        cfg.model,
        ops,
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_new_tokens=r.max_new_tokens,
        max_rows=r.max_parallel_sequences,
    )


def compile_decode(
    engine: NativeEngine, cfg: Config, sampling: Sampling, mesh: Mesh | None = None
) -> tuple[Any, int]:
    """The compiled loop, and the bytes of its arguments, results and temporaries.

    `mesh`: of a card that this machine need not have.
    """

    def make(jitted: Any, *shapes: Any, **static: Any) -> Any:
        if mesh is not None:
            return compile_jitted(mesh, jitted, *shapes, **static)
        return jitted.lower(*shapes, **static).compile()

    _, decode = engine.compile_programs(
        make, sampling, policy_shapes(cfg), samples=cfg.rollout.samples_per_prompt
    )
    sizes: Any = decode.memory_analysis()
    new = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return decode, sizes.argument_size_in_bytes + new


def token_bytes(cfg: Config, answer_tokens: int) -> float:
    """Bytes that the sampling of one token of all rows must read, after so many of its answer."""
    m, rows = cfg.model, cfg.rollout.samples_per_prompt
    weights = jax.tree.leaves(policy_shapes(cfg) | {"embed": None})  # whose rows are few
    routed = sum(count_bytes(x) for x in weights if m.n_experts in x.shape[1:2])
    chosen = 1 - (1 - m.experts_per_token / m.n_experts) ** rows
    dense = sum(map(count_bytes, weights)) - routed
    return dense + chosen * routed + rows_cache_bytes(cfg, 1, answer_tokens)


def count_bytes(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize


def time_decode(
    engine: NativeEngine, decode: Any, cfg: Config, sampling: Sampling, rounds: int, profile: bool
) -> dict[str, Any]:
    """Seconds of the loop, over the number of tokens of a row."""
    P, rows = cfg.data.max_prompt_tokens, cfg.rollout.samples_per_prompt
    params = make_random(policy_shapes(cfg))
    prompt = Prompt(0, "", tuple(17 + i % 1000 for i in range(P)), None)
    times, prefill = [], []
    dearest: list[Any] = []
    for i in range(rounds + 1 + profile):
        start = time.perf_counter()
        state, _ = engine._prefill_batch(
            (params, 0),
            [prompt],
            sampling,
            i,
            rows,
            1,
            0,
            np.full(rows, sampling.max_new_tokens, np.int32),
        )
        jax.block_until_ready(state)
        prefill.append(time.perf_counter() - start)
        arguments = (
            params,
            state,
            jnp.zeros((0,), jnp.int32),
            jnp.float32(sampling.temperature),
            jnp.int32(0),
            jnp.float32(0),
        )

        def run(arguments: Any = arguments) -> Any:
            return jax.block_until_ready(decode(*arguments))

        if i > rounds:
            dearest = trace_dearest(lambda run=run: run() and None)
            break
        start = time.perf_counter()
        state = run()
        times.append(time.perf_counter() - start)
        if int(state.column) != sampling.max_new_tokens or not bool(jnp.all(state.logp_BT <= 0)):
            raise ValueError("every row must sample all tokens, with log-probs of at most 0")
        del state, arguments
    seconds = statistics.median(times[1:])
    return {
        "seconds_a_token": seconds / sampling.max_new_tokens,
        "prefill_s": min(prefill[1:]),
        "rounds": [round(x, 4) for x in times],
        "dearest": dearest,
        "tokens_per_s": rows * sampling.max_new_tokens / seconds,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="20b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", metavar="CHIP", choices=CHIPS)
    args = parser.parse_args()
    cfg = sampling_config(args.model, args.rows, args.keys, args.tokens, *args.set)
    sampling = Sampling(args.tokens, (), 1.0)
    named = {"model": args.model, "rows": args.rows, "keys": args.keys}
    start = time.perf_counter()
    if args.compile:
        engine = make_engine(cfg, "gpu")
        _, live = compile_decode(engine, cfg, sampling, chip_mesh(args.compile))
        report(
            **named,
            compiled_for=args.compile,
            live_bytes=live,
            compile_s=round(time.perf_counter() - start, 1),
        )
        return
    engine = make_engine(cfg, jax.default_backend())
    decode, live = compile_decode(engine, cfg, sampling)
    report(**named, compile_s=round(time.perf_counter() - start, 1), compiler_bytes=live)
    with device_alone():
        figures = time_decode(engine, decode, cfg, sampling, args.rounds, args.profile)
    need = token_bytes(cfg, args.tokens // 2)
    rate = need / figures["seconds_a_token"]
    figures |= {"bytes_a_token": need, "gb_per_s": 1e-9 * rate}
    if (chip := chip_name()) in CHIPS:
        figures["share_of_bandwidth"] = rate / CHIPS[chip].memory_bandwidth
    report(**named, **figures)


if __name__ == "__main__":
    main()
