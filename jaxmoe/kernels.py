# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each kernel a command runs: decided before the first trace, once.

On a CPU there is nothing to decide and nothing is opened. On a GPU or TPU a kernel has to be right
on this very chip (`python -m pallas_kernels.check`), at this run's sizes too; the check runs in
other processes, before this one opens the device: a TPU is one process's at a time.
Next: jaxmoe/model/ops.py puts the choice into the pieces.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxmoe.config import Config, ConfigError, require
from pallas_kernels.check import child
from pallas_kernels.check.choice import (
    PLAIN,
    PLATFORMS,
    Choice,
    Judge,
    Refused,
    choose,
    judge_here,
    may_have_a_chip,
    said,
    wanted,
)
from pallas_kernels.check.verdicts import KernelVerdict, folder
from pallas_kernels.dispatch import Impl, Target
from pallas_kernels.grouped_matmul.cases import MatmulCase, zipf_sizes
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase

INVARIANT_TPUS = ("TPU v5", "TPU v6")  # whose programs were looked at
LONGEST_XLA = 2048  # tokens of a row that XLA's attention may have on a GPU or TPU unasked


class Decision(NamedTuple):
    """What runs, and what there is to tell of it."""

    impls: dict[str, Impl]  # by operation
    line: str
    alerts: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """By operation the implementation alone, for config.json."""
        return {o: impl if isinstance(impl, str) else impl[0] for o, impl in self.impls.items()}

    def tell(self) -> None:
        """On the terminal, once nothing else stands in the way of the command."""
        print(f"kernels  {self.line}", flush=True)
        for alert in self.alerts:
            print(f"alert    {alert}", flush=True)

    @property
    def of_any_dtype(self) -> dict[str, Impl]:
        """As `impls`, with XLA for what a named kernel refuses: the doctor tries other dtypes."""
        return {
            o: (impl, "xla") if isinstance(impl, str) and impl != "auto" else impl
            for o, impl in self.impls.items()
        }


def kernels_here(cfg: Config) -> Decision:
    """The choice of cfg.kernels on this machine.

    Raises ConfigError where a named kernel cannot run or is wrong here, and where a GPU or TPU
    would be left with XLA's attention for long rows.
    """
    return decide(cfg, chip_here, lambda chip: judge_here(chip, cfg.model.dtype, sizes(cfg)))


def chip_here() -> dict[str, str]:
    """The device as another process sees it; a CPU where there can be nothing else."""
    return child.chip() if may_have_a_chip() else {"platform": "cpu"}


def decide(
    cfg: Config, chip_of: Callable[[], dict[str, str]], judge_on: Callable[[dict[str, str]], Judge]
) -> Decision:
    """`kernels_here` of any chip and any judge of kernels."""
    if cfg.model.numerics == "invariant":
        return _invariant(cfg, chip_of, judge_on)
    if cfg.kernels in PLAIN:  # they need no check
        return Decision(wanted(cfg.kernels), cfg.kernels)
    try:
        chip = chip_of()
    except child.NoChip as error:
        if cfg.kernels != "auto":
            raise ConfigError(_refused(cfg.kernels, f"it cannot be checked: {error}")) from error
        return Decision(wanted("auto"), "xla", (f"no kernel is used: {error}",))
    platform = chip["platform"]
    if platform == "cpu" and cfg.kernels == "auto":
        return Decision(wanted("auto"), "xla (this is a cpu)")
    try:
        choices = choose(cfg.kernels, platform, judge_on(chip))
    except Refused as error:
        raise ConfigError(_refused(cfg.kernels, str(error))) from error
    _no_long_xla(cfg, platform, choices["sink_attention"])
    impls: dict[str, Impl] = {operation: choice.impl for operation, choice in choices.items()}
    return Decision(impls, line(choices), tuple(alerts(choices)))


def _invariant(
    cfg: Config, chip_of: Callable[[], dict[str, str]], judge_on: Callable[[dict[str, str]], Judge]
) -> Decision:
    """On a CPU XLA's pieces, on a chip its kernels, or not at all: no other is invariant."""
    off = "or --set model.numerics=fast."
    try:
        chip = chip_of()
    except child.NoChip as error:
        raise ConfigError(
            f"model.numerics=invariant must know the chip: {error}. Try JAX_PLATFORMS=cpu, {off}"
        ) from error
    platform = chip["platform"]
    name = "xla" if platform == "cpu" else f"mosaic_{platform}"
    require(
        cfg.kernels in ("auto", name),
        f"model.numerics=invariant must run in {name} on a {platform}, got kernels={cfg.kernels}. "
        f"Try --set kernels=auto, {off}",
    )
    if platform == "cpu":
        return Decision(wanted("auto"), "xla, invariant tiles")
    kind = chip.get("kind", platform)
    require(
        Target(platform, kind).is_hopper or any(x in kind for x in INVARIANT_TPUS),
        "model.numerics=invariant must run on a CPU, a Hopper GPU, a TPU v5e, v5p or v6e, for "
        "which it is shown that bits do not depend on shapes; this is a "
        f"{kind}. Try JAX_PLATFORMS=cpu, {off}",
    )
    require(
        not cfg.optim.tokens_per_microbatch,
        "model.numerics=invariant on a chip needs rows of one sequence each, got "
        f"optim.tokens_per_microbatch={cfg.optim.tokens_per_microbatch}: kernels sum keys in "
        "blocks that begin with a row. Try --set optim.tokens_per_microbatch=0 --set "
        f"optim.microbatches={cfg.rollout.sequences_per_step}, {off}",
    )
    require(
        cfg.mesh.devices == 1,
        f"model.numerics=invariant must run on one GPU or TPU, got a mesh of {cfg.mesh.devices}: "
        "programs of several were not shown to hold the same loops. Try --set mesh.data=1 --set "
        f"mesh.fsdp=1, {off}",
    )
    try:
        choices = choose(name, platform, judge_on(chip))
    except Refused as error:
        raise ConfigError(
            f"model.numerics=invariant needs kernels that are right on this machine: {error}. "
            f"Try JAX_PLATFORMS=cpu, {off}"
        ) from error
    impls: dict[str, Impl] = {operation: choice.impl for operation, choice in choices.items()}
    return Decision(impls, f"{name}, in tiles of one size whatever the batch")


def _refused(name: str, why: str) -> str:
    return f"kernels={name} must be right on this machine: {why}. Try --set kernels=auto."


def _no_long_xla(cfg: Config, platform: str, attention: Choice) -> None:
    if platform == "cpu" or attention.name not in PLAIN or cfg.context <= LONGEST_XLA:
        return
    why = "; ".join(f"{name}: {said(verdict)}" for name, verdict in attention.passed)
    raise ConfigError(
        f"attention over {cfg.context:,} tokens, more than {LONGEST_XLA:,}, must have a kernel on "
        f"a {platform}: XLA's blocks are shaped for a CPU and many times slower. {why or 'None'}. "
        "Try --set kernels=xla to take them all the same."
    )


def line(choices: Mapping[str, Choice]) -> str:
    """Of each operation what it runs, and why not what comes before it."""
    parts = []
    for operation, choice in choices.items():
        why = "; ".join(f"not {name}: {said(verdict)}" for name, verdict in choice.passed)
        parts.append((f"{choice.name} ({why})" if why else choice.name, operation))
    if len({text for text, _ in parts}) == 1:
        return parts[0][0]
    return ", ".join(f"{operation} {text}" for text, operation in parts)


def alerts(choices: Mapping[str, Choice]) -> list[str]:
    """One line for each kernel that is wrong here, or could not be checked."""
    return [
        f"{operation} runs in {choice.name} and not in {name}: {said(verdict)}. "
        + _advice(operation, name, verdict)
        for operation, choice in choices.items()
        for name, verdict in choice.passed
        if verdict.kind != "refuses"
    ]


def _advice(operation: str, name: str, verdict: KernelVerdict) -> str:
    if verdict.kind == "unknown":
        return f"Try python -m pallas_kernels.check {operation} --impl {name}."
    return f"It is checked again after rm {folder()}/{operation}-{name}-*.json."


def sizes(cfg: Config) -> dict[str, list[dict[str, Any]]]:
    """By operation, the fields of cases of the run's own sizes: one microbatch, one decode step,
    of one device's rows and heads.

    Attention has two, of a full and of a sliding layer.
    """
    m, r, mesh = cfg.model, cfg.rollout, cfg.mesh
    packed = cfg.optim.tokens_per_microbatch // cfg.context
    rows = packed or max(1, r.sequences_per_step // cfg.optim.microbatches)
    B, T = max(1, rows // mesh.row_shards), cfg.context
    N, K, H = m.n_q_heads // mesh.tensor, m.n_kv_heads // mesh.tensor, m.head_dim
    layout = "packed" if packed else "right"
    rows = B * T * m.experts_per_token
    down = MatmulCase("run", rows, m.d_expert, m.d_model, zipf_sizes(rows, m.n_experts))
    full = AttentionCase("run", B, T, T, N, K, H, layout=layout)
    cases = {
        "sink_attention": [full, full._replace(name="run_window", window=m.sliding_window)],
        "grouped_swiglu": [down._replace(D=m.d_model, F=2 * m.d_expert)],
        "grouped_matmul": [down],
        "token_logprobs": [
            LogprobsCase(
                "run", B * (T - 1), m.d_model, m.padded_vocab, m.vocab_size, r.temperature or 1.0
            )
        ],
    }
    if r.engine == "native":
        B = min(r.max_parallel_sequences, r.sequences_per_step)
        B = max(1, B // (mesh.row_shards * mesh.sequence))
        full = AttentionCase("run", B, 1, T, N, K, H, layout="right")
        slots = min(m.sliding_window, T)
        sliding = full._replace(name="run_window", S=slots, window=m.sliding_window)
        cases["decode_attention"] = [full, sliding]
    return {operation: [x._asdict() for x in several] for operation, several in cases.items()}


def planned(cfg: Config) -> str:
    """For a dry run: what is asked for, without a look at the machine."""
    if cfg.model.numerics == "invariant":
        return "in tiles of one size: mosaic_gpu or mosaic_tpu on their chips, on a CPU xla"
    if cfg.kernels == "auto":
        return "those that a check on the chip finds right, else xla; on a CPU xla"
    if cfg.kernels in PLAIN:
        return cfg.kernels
    having = [o for o, impls in PLATFORMS.items() if cfg.kernels in impls]
    where = PLATFORMS[having[0]][cfg.kernels]
    others = [o for o in PLATFORMS if o not in having]
    text = f"{cfg.kernels}, on {' or '.join(where)}"
    return text + (f", for {', '.join(having)}; auto for {', '.join(others)}" if others else "")
