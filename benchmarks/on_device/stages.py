# SPDX-License-Identifier: Apache-2.0
"""The stages of a campaign on a GPU, in order of value.

Expected times are those of an H200 with 16 cores, as a call of nine minutes showed them.
Next: the module that a stage names.
"""

from benchmarks.on_device.campaign import Stage

# cuBLAS's own choice of algorithm takes seconds, XLA's tuning minutes of compiling; smoke.py
# measures what it gives.
UNTUNED = (("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"),)
HERE = "benchmarks.on_device"
PEERS, ATTENTION_PEERS = "benchmarks.kernel_peers", "benchmarks.attention_peers"


def step(
    name: str, *arguments: str, compile_s: float = 70, device_s: float = 40, **options: object
) -> Stage:
    return Stage(
        f"step_{name}",
        (f"{HERE}.train_step", *arguments),
        400,
        compile_s,
        device_s,
        environment=UNTUNED,
    )


def tuned_step(name: str, *arguments: str) -> Stage:
    command = (f"{HERE}.train_step", *arguments)
    return Stage(f"step_{name}_tuned", command, 500, 15, 200, phase=1)


def decode(name: str, rows: int, keys: int, *arguments: str, model: str = "20b") -> Stage:
    command = (f"{HERE}.decode", "--model", model, "--rows", f"{rows}", "--keys", f"{keys}")
    return Stage(f"decode_{name}", (*command, *arguments), 400, 45, 25, environment=UNTUNED)


def pair(op: str, case: str, peer: str) -> Stage:
    name = f"pair_{op}_{case}_{peer.rpartition(':')[2]}"
    command = (f"{HERE}.kernel_pair", op, "--case", case, "--vs", peer)
    return Stage(name, command, 560, 60, 15)


def cases(group: str, limit_s: float, *arguments: str) -> Stage:
    command = (f"{HERE}.cases", "--group", group, *arguments)
    return Stage(f"cases_{group}", command, limit_s, 150, 5, phase=1)


def whole_run(name: str, limit_s: float, *arguments: str) -> Stage:
    return Stage(f"run_{name}", (f"{HERE}.whole_run", *arguments), limit_s, 120, 60, phase=1)


# Widths and a type that Hopper's kernels take; tiny.py's own are smaller, and float32.
WIDE = (
    "model.d_model=256",
    "model.head_dim=64",
    "model.d_expert=256",
    "model.vocab_multiple=64",
    "model.dtype=bfloat16",
)
RUN = tuple(x for setting in WIDE for x in ("--set", setting))
INVARIANT = ("--set", "model.numerics=invariant")
LONG = ("--tokens", "24576", "--sequences", "2")

SMOKE = Stage("smoke", (f"{HERE}.smoke",), 200, 10, 45)
GPU = (
    SMOKE,
    step("20b_24k", *LONG, "--profile"),
    Stage("expert_tiles", (f"{HERE}.expert_tiles",), 500, 60, 60),
    decode("64x1k", 64, 1024, "--profile"),
    step("20b_4k", "--tokens", "4096", "--sequences", "12", "--microbatch", "24576", "--profile"),
    decode("64x8k", 64, 8192, "--profile"),
    pair("sink_attention", "full_20b", f"{PEERS}:cudnn_sink"),
    pair("grouped_matmul", "down_20b", f"{PEERS}:grouped_mm"),
    pair("sink_attention", "full_20b", f"{PEERS}:without_sink"),
    pair("sink_attention", "full_20b", f"{PEERS}:cudnn"),
    pair("sink_attention", "full_20b", f"{ATTENTION_PEERS}:sdpa"),
    pair("sink_attention", "full_20b", f"{PEERS}:flex"),
    pair("sink_attention", "window_20b", f"{PEERS}:cudnn_sink"),
    pair("sink_attention", "window_20b", f"{PEERS}:flex"),
    pair("grouped_swiglu", "gate_up_20b", f"{PEERS}:hf_experts"),
    pair("grouped_swiglu_rounded", "gate_up_20b", "mosaic_gpu"),
    pair("grouped_swiglu_low_rank", "gate_up_20b", "mosaic_gpu"),
    pair("grouped_matmul", "down_20b", f"{PEERS}:ragged_dot"),
    pair("token_logprobs", "gptoss20b_8k", f"{PEERS}:cross_entropy"),
    decode("256x1k", 256, 1024),
    decode("1x1k", 1, 1024),
    step(
        "20b_131k",
        "--tokens",
        "131072",
        "--sequences",
        "2",
        "--set",
        "optim.expert_tokens=32768",
        device_s=130,
    ),
    decode("256x8k", 256, 8192),
    decode("1x8k", 1, 8192),
    Stage(
        "torch_step_4k",
        (f"{HERE}.torch_step", "--tokens", "4096", "--sequences", "4"),
        500,
        60,
        40,
        memory_gb=100,
    ),
    Stage(
        "torch_decode_64x1k",
        (f"{HERE}.torch_step", "--decode", "64", "--keys", "1024"),
        500,
        60,
        40,
        memory_gb=100,
    ),
    step(
        "20b_config_24k",
        *LONG,
        "--set",
        "optim.remat_inputs=host",
        "--set",
        "optim.remat_keeps=",
        "--set",
        "optim.expert_tokens=1024",
    ),
    step("mxfp4_2_layers", "--layers", "2", "--tokens", "1536", "--sequences", "8"),
    step("mxfp4_4_layers", "--layers", "4", "--tokens", "1536", "--sequences", "8"),
    cases("invariant", 400),
    whole_run(
        "tiny_invariant",
        400,
        "--config",
        "tiny.py",
        *RUN,
        *INVARIANT,
        "--peer-set",
        "model.numerics=fast",
    ),
    whole_run(
        "tool_invariant",
        500,
        "--config",
        "tiny_tool.py",
        *RUN,
        *INVARIANT,
        "--set",
        "optim.tokens_per_microbatch=0",
        "--set",
        "optim.microbatches=4",
    ),
    cases("real", 500),
    cases("rest", 500),
    cases("triton", 300),
    tuned_step("20b_24k", *LONG),
)

# What a larger card can hold.
H200 = (
    SMOKE,
    step("120b_24k", "--model", "120b", *LONG, "--set", "optim.expert_tokens=8192", "--profile"),
    decode("120b_64x8k", 64, 8192, "--profile", model="120b"),
    step("20b_24k", *LONG),
    decode("64x8k", 64, 8192),
)
CAMPAIGNS = {"gpu": GPU, "h200": H200}
