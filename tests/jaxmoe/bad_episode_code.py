# SPDX-License-Identifier: Apache-2.0
"""Tools, environments, demonstrations and an engine that a run must refuse."""

from jaxmoe.config import EngineDescription
from jaxmoe.data.rows import Message


def untyped(query):
    """Search.

    Args:
        query: A text.
    """
    return query


def undocumented(query: str) -> str:
    return query


class Environment:
    def reset(self, row, *, seed):
        return [Message("user", row.question)], {}

    def step(self, messages):
        return [], 0.0, True, False, {}

    def close(self):
        pass


class NeedsColumn:
    """In TRL's form."""

    def reset(self, secret, **columns):
        return None

    def look(self, x: int) -> str:
        """Look.

        Args:
            x: A number.
        """
        return "1"


class NoEnvironment:
    pass


def describe_engine(cfg):
    return EngineDescription(open=lambda *_: None, summary="samples single answers")


def demonstrate_nothing():
    return []


def demonstrate_too_much(row):
    return [Message("assistant", "x" * 500, channel="final")]


def demonstrate_text(row):
    return "hello"


def demonstrate_missing_column(row):
    return row.columns["nothing"]
