# SPDX-License-Identifier: Apache-2.0
"""Tools as users write them: good ones, and one that fails in every way."""

import asyncio
import enum
import math
import sys

from jaxmoe.data.rows import ToolDescription
from jaxmoe.environments.tools import Tool


class Colour(enum.Enum):
    RED = "red"


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


async def wait_and_add(a: int) -> dict:
    """Add one.

    Args:
        a: A number.
    """
    await asyncio.sleep(0.01)
    return {"sum": a + 1, "word": "für"}


def paint(colour: Colour, strength: float = 1.0) -> str:
    """Paint.

    Args:
        colour: A colour.
        strength: From 0 to 1.
    """
    return f"{colour.name} {strength}"


def mix(colours: list[Colour | None], by_name: dict[str, Colour]) -> str:
    """Mix.

    Args:
        colours: Colours.
        by_name: Named colours.
    """
    names = [colour and colour.name for colour in (*colours, *by_name.values())]
    return " ".join(map(str, names))


def search_pages(code: str, k: int) -> str:
    """Search.

    Args:
        code: A text.
        k: A number.
    """
    return code * k


def rename_function(function, name):
    function.__name__ = name
    return function


def fail(kind: str) -> object:
    """Fail in one of several manners.

    Args:
        kind: The manner.
    """
    match kind:
        case "raise":
            raise OSError("disk\nfull" + "!" * 10_000)
        case "exit":
            sys.exit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "pair":
            return "a", 1.0
        case "bytes":
            return b"\xff" * 20
        case "nan":
            return math.nan
        case "none":
            return None
        case "surrogate":
            return "a\ud800"
        case "cycle":
            cycle = []
            cycle.append(cycle)
            return cycle
        case "object":
            return Unprintable()
        case "long":
            return "x" * 10_000_000
    return kind


class Unprintable:
    def __str__(self):
        raise KeyError("no")

    __repr__ = __str__


def make_unit_tool(unit: str = "m") -> Tool:
    """A factory of tools: the policy does not see it."""
    return Tool(ToolDescription("unit", "The unit.", {"type": "object"}), lambda: unit)
