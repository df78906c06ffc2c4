# SPDX-License-Identifier: Apache-2.0
"""The report of a compiled step. Next: jaxmoe/plan/__main__.py prints it."""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxmoe.config import Config
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.collectives import sent_bytes
from jaxmoe.plan.compiled import CompiledStep, TooLarge
from jaxmoe.plan.nearest import find_nearest_fit
from jaxmoe.plan.roofline import Bounds, StepWork, sampling_work, scores_policy
from jaxmoe.plan.sampler import CompiledSampler, count_prompt_batches
from jaxmoe.plan.schedules import KernelTime
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.run.memory import Memory, format_bytes, plan_memory

PREALLOCATED = 0.75  # fraction of a GPU's memory that JAX takes without XLA_CLIENT_MEM_FRACTION


@dataclass(frozen=True)
class Fit:
    """Bytes on one device while it trains or samples."""

    step: int  # of the compiled program
    outside: int  # the native engine's copy of the weights and rollouts; or the trainer's state
    capacity: int

    @property
    def missing(self) -> int:
        return self.step + self.outside - self.capacity


def step_fit(cfg: Config, compiled: CompiledStep | TooLarge, chip: Chip) -> Fit:
    """Memory while training: the compiler's bytes, and the run's memory outside the step."""
    mem = plan_memory(cfg)
    outside = mem.engine_copy + mem.ahead
    if isinstance(compiled, TooLarge):
        return Fit(compiled.needs, outside, compiled.capacity)
    return Fit(compiled.live, outside, chip.memory)


def dry_run_bytes(mem: Memory) -> dict[str, int]:
    """The dry run's bytes in the compiler's categories."""
    stored = mem.state
    temporaries = mem.gathered + mem.gradients + mem.update + mem.activations + mem.rounded
    return {"arguments": stored, "temporaries": temporaries, "step": stored + temporaries}


def memory_lines(cfg: Config, program: CompiledStep | TooLarge, fit: Fit) -> Iterator[str]:
    """Lines comparing the compiler's bytes with the dry run's."""
    mem = plan_memory(cfg)
    computed = dry_run_bytes(mem)
    compiled = {"step": fit.step}
    if isinstance(program, CompiledStep):
        compiled |= {"arguments": program.arguments, "temporaries": program.temporaries}
    yield f"{'bytes on a device':<22}{'compiler':>12}{'arithmetic':>14}{'ratio':>8}"
    for name, value in computed.items():
        if name in compiled:
            ratio = f"{compiled[name] / value:8.2f}"
            yield f"  {name:<17}{format_bytes(compiled[name])}  {format_bytes(value)}{ratio}"
        else:
            yield f"  {name:<17}{'':>12}  {format_bytes(value)}"
    if fit.outside:
        yield f"  {'the engine':<17}{'':>12}  {format_bytes(fit.outside)}"
    yield f"  {'capacity':<17}{format_bytes(fit.capacity)}"
    if mem.host and isinstance(program, CompiledStep):
        yield f"on its host        {format_bytes(program.host)}  {format_bytes(mem.host)}"


def sampler_fit(cfg: Config, compiled: CompiledSampler | TooLarge, chip: Chip) -> Fit:
    """Memory while the engine samples, and the trainer's state."""
    mem = plan_memory(cfg)
    state = mem.state
    if isinstance(compiled, TooLarge):
        return Fit(compiled.needs, state, compiled.capacity)
    return Fit(compiled.live, state, chip.memory)


def format_fit(
    cfg: Config, fit: Fit, gpu: bool, command: str, ratios: tuple[float, float] = (1.0, 1.0)
) -> str:
    """State if the run fits; if not, the nearest setting that does, as a command.

    `ratios`: the compiler's bytes over the arithmetic's, of training and of sampling.
    """
    total = fit.step + fit.outside
    if fit.missing <= 0:
        text = f"fits         {_format_size(-fit.missing)} left"
        if gpu and total > PREALLOCATED * fit.capacity:
            share = min(0.99, total / fit.capacity + 0.02)
            text += f", with XLA_CLIENT_MEM_FRACTION={share:.2f}"
        return text
    problem = f"does not fit: {_format_size(fit.missing)} too much"
    n, changes, needed = find_nearest_fit(cfg, fit.capacity, ratios)
    if not changes:
        return f"{problem}. Try a smaller model: {n // 2:,} devices are too few."
    typed = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    if n == cfg.mesh.devices:
        return f"{problem}. Try {command} {typed}, which needs about {_format_size(needed)}."
    return f"{problem}. Try {n} devices: {typed} needs about {_format_size(needed)}."


def traffic_lines(compiled: CompiledStep, host_of: Sequence[int], gpu: bool) -> Iterator[str]:
    """Bytes that a device sends in a step, by kind of collective."""
    if not compiled.collectives:
        return
    sends, to_hosts, times = (defaultdict(float) for _ in range(3))
    for collective, count in compiled.collectives.items():
        sends[collective.kind] += collective.sent_bytes * count
        to_hosts[collective.kind] += collective.to_other_hosts(host_of) * count
        times[collective.kind] += count
    yield f"{'a device sends':<22}{'a step':>12}{'times':>14}" + (
        "   to other hosts" if gpu else ""
    )
    for kind, value in sorted(sends.items(), key=lambda item: -item[1]):
        host_text = f"     {format_bytes(round(to_hosts[kind]))}" if gpu else ""
        yield f"  {kind:<18}{format_bytes(round(value))}{times[kind]:13,.0f} {host_text}"


def bound_lines(
    work: StepWork, bounds: Bounds, chip: Chip, scores: str, kernels: KernelTime | None = None
) -> Iterator[str]:
    """The roofline of the step; `scores` is `describe_scoring`'s text."""
    recomputed = 1 - work.useful / work.flops
    yield f"{'the step takes at least':<23}{'seconds':>11}"
    compiled = {
        "arithmetic": f"{work.flops * 1e-12:,.0f} TFLOP, {recomputed:.0%} recomputed or scoring",
        "memory": f"{_format_size(round(work.traffic))} read and written",
        "links": "",
        "network": "",
    }
    for name, seconds in vars(bounds).items():
        if seconds:
            yield f"  {name:<20}{seconds:12.3g}   {compiled[name]}".rstrip()
        if name == "arithmetic" and kernels and kernels.calls:
            yield kernel_line(kernels, chip)
    share = work.useful / (bounds.step * chip.flops)
    yield (
        f"  so {bounds.step:.3g} s by {bounds.limit}: at most {share:.0%} of the bfloat16 "
        f"peak, recomputation not counted; {scores}"
    )


def kernel_line(kernels: KernelTime, chip: Chip) -> str:
    """The part of the arithmetic whose time comes from the kernels' schedules."""
    share = kernels.flops / (kernels.seconds * chip.flops)
    text = (
        f"  of it kernels       {kernels.seconds:12.3g}   by the schedules of {kernels.calls:,} "
        f"calls, {share:.0%} of the peak"
    )
    return f"{text}; {kernels.other_calls:,} others at the peak" if kernels.other_calls else text


def describe_scoring(cfg: Config, a: Algorithm) -> str:
    """Describe the scoring passes of a step's program before its first gradient."""
    scored = [" the policy"] * scores_policy(cfg, a) + [" the reference"] * a.needs_reference
    scored += [" the critic"] * (a.critic == "own")
    scored += [" the teacher"] * (a.needs_teacher_logp and not cfg.distill.is_url)
    if not scored:
        return "it needs no scoring pass"
    return f"it includes a scoring pass of{' and'.join(scored)}"


def sampler_lines(sampler: CompiledSampler, fit: Fit) -> Iterator[str]:
    """Memory of a device while it samples, and the bytes that it sends."""
    stored = {"prefill": sampler.prefill, "decode": sampler.decode, "the trainer": fit.outside}
    yield f"{'sampling, a device':<22}{'compiler':>12}"
    for name, value in stored.items():
        yield f"  {name:<17}{format_bytes(value)}"
    sends = {
        "prefill sends": sent_bytes(sampler.prefill_collectives),
        "a token sends": sent_bytes(sampler.token_collectives),
    }
    for name, value in sends.items():
        yield f"  {name:<17}{format_bytes(round(value))}"


def sampling_lines(
    cfg: Config,
    sampler: CompiledSampler,
    prefill: Bounds,
    token: Bounds,
    work: StepWork,
    bounds: Bounds,
    chip: Chip,
) -> Iterator[str]:
    """Seconds of a step's sampling and of the step; `work` and `bounds` are training's."""
    r, times = cfg.rollout, count_prompt_batches(cfg, sampler.prompts)
    rows = sampler.prompts * r.samples_per_prompt
    sampling = times * (prefill.step + r.max_new_tokens * token.step)
    yield f"{'sampling takes at least':<23}{'seconds':>11}"
    yield f"  {'prefill':<20}{prefill.step:12.3g}   by {prefill.limit}, {sampler.prompts} prompts"
    yield f"  {'a token':<20}{token.step:12.3g}   by {token.limit}, of {rows} answers at once"
    yield f"  {'a step':<20}{sampling:12.3g}   {times} times prefill, {r.max_new_tokens:,} tokens"
    before, token_work = sampling_work(cfg, sampler.prompts)
    sampled = (
        r.prompts_per_step
        / sampler.prompts
        * (before.useful + r.max_new_tokens * token_work.useful)
    )
    total_s = sampling + bounds.step
    share = (sampled + work.useful) / (total_s * chip.flops)
    yield (
        f"a step: {sampling:.3g} s of sampling + {bounds.step:.3g} s of training = {total_s:.3g} s "
        f"at least, at most {share:.1%} of the bfloat16 peak"
    )


def _format_size(value: int) -> str:
    return " ".join(format_bytes(value).split())
