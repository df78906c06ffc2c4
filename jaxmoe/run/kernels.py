# SPDX-License-Identifier: Apache-2.0
"""Choose the implementation of each kernel for a command, once, before the first trace.

On a CPU there is no choice and no device is opened. On a GPU or TPU a kernel must be correct on
this device (`python -m pallas_kernels.check`), also at the run's sizes. The check runs in child
processes before this process opens the device, because a TPU admits one process at a time.
Next: jaxmoe/model/ops.py, which puts the choice into the ops.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxmoe.config import Config, ConfigError, describe_engine, require
from jaxmoe.model.invariant_on_chip import LANES
from jaxmoe.model.weights import expert_products
from pallas_kernels.check import child
from pallas_kernels.check.choice import (
    PLAIN,
    PLATFORMS,
    Choice,
    Judge,
    KernelRefused,
    choose_kernels,
    describe_verdict,
    invariant_impls,
    make_judge,
    may_have_accelerator,
    requested_impls,
)
from pallas_kernels.check.verdicts import KernelVerdict, verdict_folder
from pallas_kernels.dispatch import Impl, Target
from pallas_kernels.grouped_matmul.cases import MatmulCase, zipf_sizes
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase

# Those whose compiled programs were examined.
INVARIANT_TPUS = ("TPU v5", "TPU v6")
MAX_XLA_TOKENS = 2048  # longer rows on a GPU or TPU use XLA's attention only with kernels=xla


class Decision(NamedTuple):
    """The chosen implementations, with the lines to print."""

    impls: dict[str, Impl]  # by operation
    line: str
    alerts: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """The preferred implementation of each operation, for config.json."""
        return {o: impl if isinstance(impl, str) else impl[0] for o, impl in self.impls.items()}

    def print_decision(self) -> None:
        """Print the decision, after all other checks of the command."""
        print(f"kernels  {self.line}", flush=True)
        for alert in self.alerts:
            print(f"alert    {alert}", flush=True)

    @property
    def with_xla_fallback(self) -> dict[str, Impl]:
        """`impls` with XLA as the fallback of named kernels: the doctor tries other dtypes."""
        return {
            o: (impl, "xla") if isinstance(impl, str) and impl != "auto" else impl
            for o, impl in self.impls.items()
        }


def choose_run_kernels(cfg: Config) -> Decision:
    """Choose the kernels of this machine by cfg.kernels.

    Raises: ConfigError when a named kernel cannot run or is wrong on this machine, and when a GPU
    or TPU would run XLA's attention on long rows.
    """
    return decide_kernels(
        cfg,
        detect_chip,
        lambda chip: make_judge(chip, cfg.model.dtype, run_cases(cfg, chip["platform"])),
    )


def detect_chip() -> dict[str, str]:
    """The device that a child process finds; a CPU if JAX can find nothing else."""
    return child.find_chip() if may_have_accelerator() else {"platform": "cpu"}


def decide_kernels(
    cfg: Config, chip_of: Callable[[], dict[str, str]], judge_on: Callable[[dict[str, str]], Judge]
) -> Decision:
    """`choose_run_kernels` for a given device and judge of kernels."""
    if cfg.model.numerics == "invariant":
        return _decide_invariant(cfg, chip_of, judge_on)
    if cfg.kernels in PLAIN:  # they need no check
        return Decision(requested_impls(cfg.kernels), cfg.kernels)
    try:
        chip = chip_of()
    except child.NoChip as error:
        if cfg.kernels != "auto":
            reason = f"it could not be checked: {error}"
            raise ConfigError(_refusal_text(cfg.kernels, reason)) from error
        return Decision(requested_impls("auto"), "xla", (f"no kernel is used: {error}",))
    platform = chip["platform"]
    if platform == "cpu" and cfg.kernels == "auto":
        return Decision(requested_impls("auto"), "xla (this is a cpu)")
    try:
        choices = choose_kernels(cfg.kernels, platform, judge_on(chip))
    except KernelRefused as error:
        raise ConfigError(_refusal_text(cfg.kernels, str(error))) from error
    _refuse_long_xla(cfg, platform, choices["sink_attention"])
    impls: dict[str, Impl] = {operation: choice.impl for operation, choice in choices.items()}
    return Decision(impls, format_choices(choices), tuple(format_alerts(choices)))


def _decide_invariant(
    cfg: Config, chip_of: Callable[[], dict[str, str]], judge_on: Callable[[dict[str, str]], Judge]
) -> Decision:
    """Batch-invariant ops: XLA's on a CPU, the platform's kernels on an accelerator.

    Raises: ConfigError where neither is known to be invariant.
    """
    alternative = "or --set model.numerics=fast."
    try:
        chip = chip_of()
    except child.NoChip as error:
        raise ConfigError(
            f"model.numerics=invariant must know the device: {error}. "
            f"Try JAX_PLATFORMS=cpu, {alternative}"
        ) from error
    platform = chip["platform"]
    name = "xla" if platform == "cpu" else f"mosaic_{platform}"
    require(
        cfg.kernels in ("auto", name),
        f"model.numerics=invariant must run in {name} on a {platform}, got kernels={cfg.kernels}. "
        f"Try --set kernels=auto, {alternative}",
    )
    if platform == "cpu":
        return Decision(invariant_impls("xla"), "xla, batch-invariant tiles")
    kind = chip.get("kind", platform)
    require(
        Target(platform, kind).is_hopper or any(x in kind for x in INVARIANT_TPUS),
        "model.numerics=invariant must run on a CPU, a Hopper GPU, or a TPU v5e, v5p or v6e, where "
        "results were shown to be independent of the batch; this is a "
        f"{kind}. Try JAX_PLATFORMS=cpu, {alternative}",
    )
    require(
        not cfg.optim.tokens_per_microbatch,
        "model.numerics=invariant on a chip needs rows of one sequence each, got "
        f"optim.tokens_per_microbatch={cfg.optim.tokens_per_microbatch}: kernels sum keys in "
        "blocks that begin with a row. Try --set optim.tokens_per_microbatch=0 --set "
        f"optim.microbatches={cfg.rollout.sequences_per_step}, {alternative}",
    )
    require(
        cfg.mesh.devices == 1,
        f"model.numerics=invariant must run on one GPU or TPU, got a mesh of {cfg.mesh.devices}: "
        "programs for several devices were not examined. Try --set mesh.data=1 --set "
        f"mesh.fsdp=1, {alternative}",
    )
    try:
        choices = choose_kernels(f"{name}_invariant", platform, judge_on(chip))
    except KernelRefused as error:
        raise ConfigError(
            f"model.numerics=invariant needs kernels that are correct on this machine: {error}. "
            f"Try JAX_PLATFORMS=cpu, {alternative}"
        ) from error
    impls: dict[str, Impl] = {operation: choice.impl for operation, choice in choices.items()}
    return Decision(impls, f"{name}, batch-invariant tiles")


def _refusal_text(name: str, reason: str) -> str:
    return f"kernels={name} must be correct on this machine: {reason}. Try --set kernels=auto."


def _refuse_long_xla(cfg: Config, platform: str, attention: Choice) -> None:
    if platform == "cpu" or attention.name not in PLAIN or cfg.context <= MAX_XLA_TOKENS:
        return
    reasons = [f"{name}: {describe_verdict(verdict)}" for name, verdict in attention.rejected]
    raise ConfigError(
        f"attention over {cfg.context:,} tokens, more than {MAX_XLA_TOKENS:,}, needs a kernel on a "
        f"{platform}, because XLA's attention is made for CPUs and many times slower. Kernels: "
        f"{'; '.join(reasons) or 'none'}. Try --set kernels=xla to use XLA's attention."
    )


def format_choices(choices: Mapping[str, Choice]) -> str:
    """The implementation of each operation, and the reasons against preferred ones."""
    parts = []
    for operation, choice in choices.items():
        reasons = [f"not {name}: {describe_verdict(verdict)}" for name, verdict in choice.rejected]
        text = f"{choice.name} ({'; '.join(reasons)})" if reasons else choice.name
        parts.append((text, operation))
    if len({text for text, _ in parts}) == 1:
        return parts[0][0]
    return ", ".join(f"{operation} {text}" for text, operation in parts)


def format_alerts(choices: Mapping[str, Choice]) -> list[str]:
    """One line for each kernel that is wrong on this machine, or could not be checked."""
    return [
        f"{operation} uses {choice.name} instead of {name}: {describe_verdict(verdict)}. "
        + _next_step(operation, name, verdict)
        for operation, choice in choices.items()
        for name, verdict in choice.rejected
        if verdict.kind != "refuses"
    ]


def _next_step(operation: str, name: str, verdict: KernelVerdict) -> str:
    if verdict.kind == "unknown":
        return f"Try python -m pallas_kernels.check {operation} --impl {name}."
    return f"To check it again type rm {verdict_folder()}/{operation}-{name}-*.json."


def run_cases(cfg: Config, platform: str) -> dict[str, list[dict[str, Any]]]:
    """Fields of cases of the run's sizes by operation: one microbatch or decode step per device.

    Attention has a case for each window, of a full layer and of a sliding one. Experts have one for
    each product that may read them, whose name is the field "op". With batch-invariant numerics the
    linear layers of an accelerator are grouped matmuls of one group (invariant_on_chip.py).
    """
    m, r, mesh = cfg.model, cfg.rollout, cfg.mesh
    packed = cfg.optim.tokens_per_microbatch // cfg.context
    rows = packed or max(1, r.sequences_per_step // cfg.optim.microbatches)
    B, T = max(1, rows // mesh.row_shards), cfg.context
    N, K, H = m.n_q_heads // mesh.tensor, m.n_kv_heads // mesh.tensor, m.head_dim
    layout = "packed" if packed else "right"
    rows = B * T * cfg.computed_experts
    sizes, rank = zipf_sizes(rows, m.n_experts), cfg.lora.expert_rank
    experts = {
        "grouped_swiglu": MatmulCase("run", rows, m.d_model, 2 * m.d_expert, sizes, rank),
        "grouped_matmul": MatmulCase("run", rows, m.d_expert, m.d_model, sizes, rank),
    }
    full = AttentionCase("run", B, T, T, N, K, H, layout=layout)
    windows = sorted({kind.window or 0 for kind in m.plan.kinds})
    cases = {
        "sink_attention": [
            full._replace(name="run_window" if window else "run", window=window)
            for window in windows
        ],
        "grouped_swiglu": [],
        "grouped_matmul": [],
        "token_logprobs": [
            # The last column of a row has no target and is not computed.
            LogprobsCase(
                "run", B * (T - 1), m.d_model, m.padded_vocab, m.vocab_size, r.temperature or 1.0
            )
        ],
    }
    if m.numerics == "invariant" and platform != "cpu":
        multiple = LANES if platform == "tpu" else 1
        layers = {"q": (m.d_model, N * H), "kv": (m.d_model, K * H), "output": (N * H, m.d_model)}
        for name, (width, columns) in layers.items():
            columns = -(-columns // multiple) * multiple
            case = MatmulCase(f"run_{name}", B * T, width, columns, (B * T,))
            cases["grouped_matmul"].append(case)
    if describe_engine(cfg).uses_trainer_forward:
        B = min(r.max_parallel_sequences, r.sequences_per_step)
        B = max(1, B // (mesh.row_shards * mesh.sequence))
        full = AttentionCase("run", B, 1, T, N, K, H, layout="right")
        cases["decode_attention"] = [
            full._replace(name="run_window", S=min(window, T), window=window) if window else full
            for window in windows
        ]
    fields = {operation: [x._asdict() for x in group] for operation, group in cases.items()}
    for operation, case in experts.items():
        names = [operation + suffix for suffix in expert_products(cfg)]
        fields[operation] = [case._asdict() | {"op": name} for name in names] + fields[operation]
    return fields


def describe_kernels(cfg: Config) -> str:
    """Describe the requested kernels for a dry run, which does not examine the machine."""
    if cfg.model.numerics == "invariant":
        return (
            "batch-invariant tiles: mosaic_gpu_invariant on GPUs, mosaic_tpu_invariant on TPUs, "
            "xla_invariant on CPUs"
        )
    if cfg.kernels == "auto":
        return "kernels that pass a check on the device, else xla; on a CPU xla"
    if cfg.kernels in PLAIN:
        return cfg.kernels
    with_impl = [o for o, impls in PLATFORMS.items() if cfg.kernels in impls]
    platforms = PLATFORMS[with_impl[0]][cfg.kernels]
    auto_operations = [o for o in PLATFORMS if o not in with_impl]
    text = f"{cfg.kernels}, on {' or '.join(platforms)}"
    return text + (
        f", for {', '.join(with_impl)}; auto for {', '.join(auto_operations)}"
        if auto_operations
        else ""
    )
