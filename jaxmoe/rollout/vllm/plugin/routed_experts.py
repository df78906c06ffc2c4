# SPDX-License-Identifier: Apache-2.0
"""Routed experts on vLLM's CPU."""


def install() -> None:
    """Nothing yet."""
