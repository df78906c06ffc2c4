# SPDX-License-Identifier: Apache-2.0
"""The order of a model's layers: kinds that repeat, and the one map from layers to stacks.

A plan is a list of kinds that repeats with a period; those of GPT-OSS are (sliding, full). Layers
at one place of the period are a group, whose parameters and caches are stacked, since `forward`
scans over complete periods. Layers after the last complete period are groups of one layer.

    layer = group.first + group.step * index      plan.find_layer(layer) = (group.name, index)

With three layers of GPT-OSS the groups are "sliding" (layer 0), "full" (1) and "tail_sliding" (2).
Next: jaxmoe/model/params.py, the parameters of a kind.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from jaxmoe.config.errors import ConfigError
from jaxmoe.config.function_specs import parse_call, split_calls

KEY, GPT_OSS = "model.layer_types", "sliding+full"


@dataclass(frozen=True)
class BlockKind:
    """One kind of layer; what a kind does not have is no parameter of it."""

    name: str  # sliding or full
    window: int | None = None  # keys that a query reads, including its own; None: all
    sinks: bool = True  # attention sinks
    biases: bool = True  # of attention, router and experts


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind whose parameters and caches are one stack."""

    name: str  # key in params["layers"]
    kind: BlockKind
    first: int  # number of the first layer
    step: int  # from one layer of the group to the next
    size: int  # layers of the group

    def layer_number(self, index: Any) -> Any:
        """Return the number of the layer at an index of the stack, which may be an array."""
        return self.step * index + self.first


@dataclass(frozen=True)
class LayerPlan:
    """The kind of each layer of a model."""

    kinds: tuple[BlockKind, ...]

    @cached_property
    def blocks(self) -> tuple[tuple[LayerGroup, ...], ...]:
        """Groups that one scan runs together: those of the period, and those of the tail."""
        period = find_period(self.kinds)
        repeats, n_tail = divmod(len(self.kinds), period)
        start = period * repeats
        return (
            self._make_groups("", 0, period, repeats),
            *([self._make_groups("tail_", start, n_tail, 1)] if n_tail else []),
        )

    def _make_groups(
        self, prefix: str, start: int, count: int, size: int
    ) -> tuple[LayerGroup, ...]:
        groups, names = list[LayerGroup](), list[str]()
        for first in range(start, start + count):
            kind = self.kinds[first]
            names.append(kind.name)
            n = names.count(kind.name)
            name = prefix + kind.name + (f"_{n}" if n > 1 else "")
            groups.append(LayerGroup(name, kind, first, count, size))
        return tuple(groups)

    @cached_property
    def groups(self) -> dict[str, LayerGroup]:
        """All groups by name."""
        return {group.name: group for block in self.blocks for group in block}

    def find_layer(self, layer: int) -> tuple[str, int]:
        """Return the name of a layer's group, and its index in the stack."""
        for group in self.groups.values():
            index, remainder = divmod(layer - group.first, group.step)
            if remainder == 0 and 0 <= index < group.size:
                return group.name, index
        raise ValueError(f"layer must be one of {len(self.kinds)}, got {layer}.")


def find_period(items: Sequence[Any]) -> int:
    """Return the smallest p with items[i] == items[i mod p] for all i."""
    sizes = range(1, len(items))
    fits = (p for p in sizes if all(x == items[i % p] for i, x in enumerate(items)))
    return next(fits, len(items))


def has_gpt_oss_order(plan: LayerPlan) -> bool:
    """Return True if layers are sliding and full in turn, whatever their number."""
    names = GPT_OSS.split("+")
    return all(kind.name == names[i % len(names)] for i, kind in enumerate(plan.kinds))


@cache
def parse_layer_types(text: str, n_layers: int, window: int) -> LayerPlan:
    """Return the plan of `n_layers` layers: the kinds of the text, repeated.

    A kind is sliding or full, perhaps with options, as in "sliding(window=64)+full(sinks=False)".
    `window` is that of sliding layers without the option. Raises ConfigError.
    """
    kinds = [_parse_kind(call, window) for call in split_calls(text) or [text]]
    return LayerPlan(tuple(kinds[i % len(kinds)] for i in range(n_layers)))


def _parse_kind(call: str, window: int) -> BlockKind:
    with contextlib.suppress(ConfigError):
        name, options = parse_call(call, KEY)
        types = {"sinks": bool, "biases": bool} | ({"window": int} if name == "sliding" else {})
        has_types = all(type(value) is types.get(option) for option, value in options.items())
        if name in GPT_OSS.split("+") and has_types and 0 < options.get("window", 1) < 2**31:
            window_or_none = window if name == "sliding" else None
            return BlockKind(**{"name": name, "window": window_or_none, **options})
    raise ConfigError(
        f"{KEY} must be kinds of layers, sliding or full, with + between them; options are window "
        f"(above 0, of sliding), sinks and biases (True or False). Got {call.strip()!r}. "
        f'Try --set "{KEY}=sliding(window=64)+full(sinks=False)".'
    )
