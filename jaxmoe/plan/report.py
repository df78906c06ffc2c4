# SPDX-License-Identifier: Apache-2.0
"""What a person reads of a compiled step. Next: jaxmoe/plan/__main__.py prints it."""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxmoe.config import Config
from jaxmoe.memory import Memory, format_bytes, plan_memory
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.collectives import sent
from jaxmoe.plan.compiled import Step, TooLarge
from jaxmoe.plan.nearest import nearest
from jaxmoe.plan.roofline import Bounds, StepWork, scores_policy, wave_work
from jaxmoe.plan.sampler import Wave, waves
from jaxmoe.plan.schedules import Kernels
from jaxmoe.rl.algorithm import Algorithm

PREALLOCATED = 0.75  # of a GPU's memory, that JAX takes unless XLA_CLIENT_MEM_FRACTION says


@dataclass(frozen=True)
class Fit:
    """Bytes on one device while it trains, or samples."""

    step: int  # what the compiled program holds
    beside: int  # the native engine's copy of the weights, and what it samples ahead; or the state
    there: int

    @property
    def missing(self) -> int:
        return self.step + self.beside - self.there


def fit(cfg: Config, found: Step | TooLarge, chip: Chip) -> Fit:
    """Of the compiler's bytes, beside what the run holds outside the step."""
    mem = plan_memory(cfg)
    beside = mem.engine_copy + mem.ahead
    if isinstance(found, TooLarge):
        return Fit(found.needs, beside, found.there)
    return Fit(found.live, beside, chip.memory)


def arithmetic(mem: Memory) -> dict[str, int]:
    """The dry run's bytes, as the compiler divides them."""
    held = mem.weights + mem.optimizer + mem.reference
    made = mem.gathered + mem.gradients + mem.update + mem.activations
    return {"arguments": held, "temporaries": made, "step": held + made}


def memory_lines(cfg: Config, found: Step | TooLarge, of: Fit) -> Iterator[str]:
    """The compiler's bytes beside the dry run's."""
    mem = plan_memory(cfg)
    computed = arithmetic(mem)
    told = {"step": of.step}
    if isinstance(found, Step):
        told |= {"arguments": found.arguments, "temporaries": found.temporaries}
    yield f"{'bytes on a device':<22}{'compiler':>12}{'arithmetic':>14}{'ratio':>8}"
    for name, value in computed.items():
        if name in told:
            ratio = f"{told[name] / value:8.2f}"
            yield f"  {name:<17}{format_bytes(told[name])}  {format_bytes(value)}{ratio}"
        else:
            yield f"  {name:<17}{'':>12}  {format_bytes(value)}"
    if of.beside:
        yield f"  {'the engine':<17}{'':>12}  {format_bytes(of.beside)}"
    yield f"  {'of':<17}{format_bytes(of.there)}"
    if mem.host and isinstance(found, Step):
        yield f"on its host        {format_bytes(found.host)}  {format_bytes(mem.host)}"


def wave_fit(cfg: Config, found: Wave | TooLarge, chip: Chip) -> Fit:
    """While the engine samples; the trainer's state lies beside."""
    mem = plan_memory(cfg)
    state = mem.weights + mem.optimizer + mem.reference
    if isinstance(found, TooLarge):
        return Fit(found.needs, state, found.there)
    return Fit(found.live, state, chip.memory)


def verdict(
    cfg: Config, of: Fit, gpu: bool, command: str, off: tuple[float, float] = (1.0, 1.0)
) -> str:
    """Whether it fits; where it does not, the nearest setting that does, as a command.

    `off`: the compiler's bytes over the arithmetic's, of training and of sampling.
    """
    total = of.step + of.beside
    if of.missing <= 0:
        text = f"fits         {_short(-of.missing)} are left"
        if gpu and total > PREALLOCATED * of.there:
            share = min(0.99, total / of.there + 0.02)
            text += f", with XLA_CLIENT_MEM_FRACTION={share:.2f}"
        return text
    lacks = f"does not fit: {_short(of.missing)} are missing"
    n, changes, needs = nearest(cfg, of.there, off)
    if not changes:
        return f"{lacks}. Try a smaller model: {n // 2:,} devices are too few."
    typed = " ".join(f"--set {shlex.quote(one)}" for one in changes)
    if n == cfg.mesh.devices:
        return f"{lacks}. Try {command} {typed}, which needs about {_short(needs)}."
    return f"{lacks}. Try {n} devices, from which it fits: {typed} needs about {_short(needs)}."


def traffic_lines(found: Step, host_of: Sequence[int], gpu: bool) -> Iterator[str]:
    """By kind what a device sends in a step."""
    if not found.collectives:
        return
    sends, outside, times = (defaultdict(float) for _ in range(3))
    for one, count in found.collectives.items():
        sends[one.kind] += one.sent * count
        outside[one.kind] += one.to_other_hosts(host_of) * count
        times[one.kind] += count
    yield f"{'a device sends':<22}{'a step':>12}{'times':>14}" + (
        "   to other hosts" if gpu else ""
    )
    for kind, value in sorted(sends.items(), key=lambda item: -item[1]):
        more = f"     {format_bytes(round(outside[kind]))}" if gpu else ""
        yield f"  {kind:<18}{format_bytes(round(value))}{times[kind]:13,.0f} {more}"


def bound_lines(
    done: StepWork, least: Bounds, chip: Chip, scores: str, kernels: Kernels | None = None
) -> Iterator[str]:
    """The roofline of the step; `scores` says which passes it makes before the first gradient."""
    again = 1 - done.useful / done.flops
    yield f"{'the step takes at least':<23}{'seconds':>11}"
    told = {
        "arithmetic": f"{done.flops * 1e-12:,.0f} TFLOP, {again:.0%} of them made again or scores",
        "memory": f"{_short(round(done.traffic))} read and written",
        "links": "", "network": "",
    }  # fmt: skip
    for name, seconds in vars(least).items():
        if seconds:
            yield f"  {name:<20}{seconds:12.3g}   {told[name]}".rstrip()
        if name == "arithmetic" and kernels and kernels.calls:
            yield kernel_line(kernels, chip)
    share = done.useful / (least.step * chip.flops)
    yield (
        f"  so {least.step:.3g} s by {least.limit}: at most {share:.0%} of the bfloat16 peak, what "
        f"is made again not counted; {scores}"
    )


def kernel_line(kernels: Kernels, chip: Chip) -> str:
    """Of the arithmetic, what the schedules of kernels say."""
    share = kernels.flops / (kernels.seconds * chip.flops)
    text = (
        f"  of it kernels       {kernels.seconds:12.3g}   by the schedules of {kernels.calls:,} "
        f"calls, {share:.0%} of the peak"
    )
    return f"{text}; {kernels.others:,} others at the peak" if kernels.others else text


def passes(cfg: Config, a: Algorithm) -> str:
    """What a step scores before its first gradient, in its own program."""
    own = [" the policy"] * scores_policy(cfg, a) + [" the reference"] * (a.kl_coef > 0)
    own += [" the critic"] * (a.critic == "own")
    return f"a scoring pass of{' and'.join(own)} is in it" if own else "it needs no scoring pass"


def wave_lines(wave: Wave, of: Fit) -> Iterator[str]:
    """What a device holds while it samples, and sends."""
    held = {"prefill": wave.prefill, "decode": wave.decode, "the trainer": of.beside}
    yield f"{'sampling, a device':<22}{'compiler':>12}"
    for name, value in held.items():
        yield f"  {name:<17}{format_bytes(value)}"
    sends = {"prefill sends": sent(wave.before), "a token sends": sent(wave.token)}
    for name, value in sends.items():
        yield f"  {name:<17}{format_bytes(round(value))}"


def sampling_lines(
    cfg: Config, wave: Wave, prefill: Bounds, token: Bounds, done: StepWork, least: Bounds,
    chip: Chip,
) -> Iterator[str]:  # fmt: skip
    """Seconds of a step's sampling, and of the whole of it; `done` and `least` are training's."""
    r, times = cfg.rollout, waves(cfg, wave.prompts)
    rows = wave.prompts * r.samples_per_prompt
    sampling = times * (prefill.step + r.max_new_tokens * token.step)
    yield f"{'sampling takes at least':<23}{'seconds':>11}"
    yield f"  {'prefill':<20}{prefill.step:12.3g}   by {prefill.limit}, {wave.prompts} prompts"
    yield f"  {'a token':<20}{token.step:12.3g}   by {token.limit}, of {rows} answers at once"
    yield f"  {'a step':<20}{sampling:12.3g}   {times} times prefill, {r.max_new_tokens:,} tokens"
    before, each = wave_work(cfg, wave.prompts)
    sampled = r.prompts_per_step / wave.prompts * (before.useful + r.max_new_tokens * each.useful)
    whole = sampling + least.step
    share = (sampled + done.useful) / (whole * chip.flops)
    yield (
        f"a step: {sampling:.3g} s of sampling + {least.step:.3g} s of training = {whole:.3g} s at "
        f"least, at most {share:.1%} of the bfloat16 peak"
    )


def _short(value: int) -> str:
    return " ".join(format_bytes(value).split())
