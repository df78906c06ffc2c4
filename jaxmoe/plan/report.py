# SPDX-License-Identifier: Apache-2.0
"""What a person reads of a compiled step. Next: jaxmoe/plan/__main__.py prints it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxmoe.config import Config
from jaxmoe.memory import Memory, memory, size_text, smaller
from jaxmoe.plan.chips import Chip
from jaxmoe.plan.compiled import Step, TooLarge
from jaxmoe.plan.roofline import Bounds, StepWork

PREALLOCATED = 0.75  # of a GPU's memory, that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says


@dataclass(frozen=True)
class Fit:
    """Bytes on one device while it trains."""

    step: int  # what the compiled step holds
    beside: int  # the native engine's copy of the weights, and what it samples ahead
    there: int

    @property
    def missing(self) -> int:
        return self.step + self.beside - self.there


def fit(cfg: Config, found: Step | TooLarge, chip: Chip) -> Fit:
    """Of the compiler's bytes, beside what the run holds outside the step."""
    mem = memory(cfg)
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
    mem = memory(cfg)
    computed = arithmetic(mem)
    told = {"step": of.step}
    if isinstance(found, Step):
        told |= {"arguments": found.arguments, "temporaries": found.temporaries}
    yield f"{'bytes on a device':<22}{'compiler':>12}{'arithmetic':>14}{'ratio':>8}"
    for name, value in computed.items():
        if name in told:
            ratio = f"{told[name] / value:8.2f}"
            yield f"  {name:<17}{size_text(told[name])}  {size_text(value)}{ratio}"
        else:
            yield f"  {name:<17}{'':>12}  {size_text(value)}"
    if of.beside:
        yield f"  {'the engine':<17}{'':>12}  {size_text(of.beside)}"
    yield f"  {'of':<17}{size_text(of.there)}"
    if mem.host and isinstance(found, Step):
        yield f"on its host        {size_text(found.host)}  {size_text(mem.host)}"


def verdict(cfg: Config, of: Fit, gpu: bool) -> str:
    """Whether it fits; where it does not, what would, by the dry run's arithmetic."""
    total = of.step + of.beside
    if of.missing <= 0:
        text = f"fits         {_short(-of.missing)} are left"
        if gpu and total > PREALLOCATED * of.there:
            share = min(0.99, total / of.there + 0.02)
            text += f", with XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}"
        return text
    off = of.step / arithmetic(memory(cfg))["step"]
    tried, changes = smaller(cfg, "training", round(of.there / max(1.0, off)))
    then = memory(tried).training * off
    advice = "Try more devices, more of which share the weights"
    if changes:
        advice = f"Try {' '.join(changes)}, which needs about {_short(round(then))}"
        advice += "" if then <= of.there else ": more devices as well"
    return f"does not fit: {_short(of.missing)} are missing. {advice}."


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
        more = f"     {size_text(round(outside[kind]))}" if gpu else ""
        yield f"  {kind:<18}{size_text(round(value))}{times[kind]:13,.0f} {more}"


def bound_lines(done: StepWork, least: Bounds, chip: Chip) -> Iterator[str]:
    """The roofline."""
    again = 1 - done.useful / done.flops
    yield f"{'a step takes at least':<22}{'seconds':>12}"
    told = {
        "arithmetic": f"{done.flops * 1e-12:,.0f} TFLOP, {again:.0%} of them made again or scores",
        "memory": f"{_short(round(done.traffic))} read and written",
        "links": "", "network": "",
    }  # fmt: skip
    for name, seconds in vars(least).items():
        if seconds:
            yield f"  {name:<20}{seconds:12.3g}   {told[name]}".rstrip()
    share = done.useful / (least.step * chip.flops)
    yield (
        f"  so {least.step:.3g} s by {least.limit}: at most {share:.0%} of the bfloat16 peak, what "
        "is made again not counted"
    )


def _short(value: int) -> str:
    return " ".join(size_text(value).split())
