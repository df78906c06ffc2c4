# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter into a running vLLM, in the place of the one before, and what is live of it.

vLLM says no more of an adapter than that it was read: a matrix that no layer takes is skipped
without a word, and a worker that dropped the adapter takes, with the next request, whatever lies at
the request's path. So the buffers that its kernels read are compared before and after, as other
weights are. Next: loaded_state.py.
"""

import json
from pathlib import Path
from typing import Any

from jaxmoe.vllm_plugin import manifest
from jaxmoe.vllm_plugin.live import digests
from jaxmoe.vllm_plugin.loaded_state import ExpectedParameter
from jaxmoe.vllm_plugin.names import ADAPTER, NUMBER, adapter_places
from jaxmoe.vllm_plugin.transfer import check_bytes

CONFIG = "adapter_config.json"


def load(worker: Any, directory: Path) -> None:
    """Check a folder of PEFT's, with a manifest beside, and load it; nothing else is served then.

    After vLLM's finish_weight_update, which drops every adapter.
    Raises UpdateRejected, naming tensors, before anything is touched.
    """
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    manifest.check_folder(directory)
    expected = manifest.read(directory)
    manifest.check_files(expected, directory)
    received = check_bytes(expected, directory)
    where = adapter_places(list(expected.tensors), json.loads((directory / CONFIG).read_text()))
    model = worker.model_runner.get_model()
    before, _ = digests(model)
    manifest.reject(
        expected.label,
        [f"{name} has no layer of this vLLM: it serves no adapter of it"
         for name, place in where.items() if place not in before],
    )  # fmt: skip
    state = worker.weight_transfer_engine.loaded_state
    state.invalidate()
    worker.add_lora(LoRARequest(ADAPTER, NUMBER, str(directory), load_inplace=True))
    took = {name: ExpectedParameter(received[name], False, where[name]) for name in received}
    state.record(expected.label, received, took, before, *digests(model))
