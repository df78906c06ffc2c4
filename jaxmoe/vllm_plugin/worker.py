# SPDX-License-Identifier: Apache-2.0
"""What a trainer may ask a vLLM worker.

vLLM takes it by --worker-extension-cls jaxmoe.vllm_plugin.worker.Worker.
Its methods are called by name through vLLM's collective_rpc.
"""

from typing import Any


class Worker:
    """Mixed by vLLM into its own worker class; `self` is that worker."""

    def jaxmoe_loaded_state(self) -> dict[str, Any]:
        """What this worker has loaded: digests of what it received and of its live parameters.

        JSON-able. Cost: one pass over the parameters where they are (live.py).
        """
        from jaxmoe.vllm_plugin import compat
        from jaxmoe.vllm_plugin.live import digests
        from jaxmoe.vllm_plugin.loaded_state import LoadedState
        from jaxmoe.vllm_plugin.names import CONSTANTS, SIZES

        worker: Any = self
        state = getattr(worker.weight_transfer_engine, "loaded_state", None) or LoadedState(
            instance=""
        )
        config = worker.vllm_config.model_config
        model = {name: getattr(config.hf_text_config, name, None) for name in SIZES + CONSTANTS}
        model["dtype"] = str(config.dtype).removeprefix("torch.")
        report = state.report(*digests(worker.model_runner.get_model()))
        return report | {
            "vllm": compat.version(), "model": model, "logprobs_mode": config.logprobs_mode,
            "replicas": worker.vllm_config.parallel_config.data_parallel_size,
            "rows": worker.vllm_config.scheduler_config.max_num_seqs,
        }  # fmt: skip

    def jaxmoe_record(self) -> None:
        """Keep what each module gives, of the one forward until `jaxmoe_recorded`."""
        from jaxmoe.vllm_plugin.recording import Recording

        worker: Any = self
        worker.jaxmoe_recording = Recording(worker.model_runner.get_model())

    def jaxmoe_recorded(self) -> dict[str, Any]:
        """`Recording.stop`."""
        worker: Any = self
        return worker.jaxmoe_recording.stop()

    def jaxmoe_load_adapter(self, path: str) -> None:
        """Take the adapter of a folder in the place of the one before (adapter.py)."""
        from pathlib import Path

        from jaxmoe.vllm_plugin import adapter

        adapter.load(self, Path(path))
