# SPDX-License-Identifier: Apache-2.0
"""Methods that a trainer calls on a vLLM worker.

vLLM loads the class by --worker-extension-cls jaxmoe.vllm.plugin.worker.Worker; the methods are
called by name through vLLM's collective_rpc.
"""

from typing import Any


class Worker:
    """Mixed by vLLM into its own worker class; `self` is that worker."""

    def jaxmoe_loaded_state(self) -> dict[str, Any]:
        """Return this worker's loaded weights: digests of received tensors and of live parameters.

        The result is JSON-serializable. Cost: one pass over the parameters on their device
        (live_parameters.py).
        """
        from jaxmoe.vllm.plugin import compat
        from jaxmoe.vllm.plugin.live_parameters import digest_parameters
        from jaxmoe.vllm.plugin.loaded_state import LoadedState
        from jaxmoe.vllm.plugin.names import CONSTANTS, SIZES
        from jaxmoe.vllm.plugin.transfer import name_expert_format

        worker: Any = self
        state = getattr(worker.weight_transfer_engine, "loaded_state", None) or LoadedState(
            instance=""
        )
        config = worker.vllm_config.model_config
        model = {name: getattr(config.hf_text_config, name, None) for name in SIZES + CONSTANTS}
        model["dtype"] = str(config.dtype).removeprefix("torch.")
        speculative = worker.vllm_config.speculative_config
        report = state.build_report(*digest_parameters(worker.model_runner.get_model()))
        return report | {
            "vllm": compat.vllm_version(),
            "model": model,
            "logprobs_mode": config.logprobs_mode,
            "replicas": worker.vllm_config.parallel_config.data_parallel_size,
            "rows": worker.vllm_config.scheduler_config.max_num_seqs,
            # "ngram", "eagle" and so on; None without speculative decoding
            "drafts": None if speculative is None else str(speculative.method or "drafts"),
            "experts": name_expert_format(worker.vllm_config.quant_config),
        }

    def jaxmoe_record(self) -> None:
        """Record the outputs of each module during the one forward until `jaxmoe_recorded`."""
        from jaxmoe.vllm.plugin.recording import Recording

        worker: Any = self
        worker.jaxmoe_recording = Recording(worker.model_runner.get_model())

    def jaxmoe_recorded(self) -> dict[str, Any]:
        """Return `Recording.stop()`."""
        worker: Any = self
        return worker.jaxmoe_recording.stop()

    def jaxmoe_load_adapter(self, path: str) -> None:
        """Load the adapter of a folder in place of the previous one (adapter_loading.py)."""
        from pathlib import Path

        from jaxmoe.vllm.plugin import adapter_loading

        adapter_loading.load_adapter(self, Path(path))
