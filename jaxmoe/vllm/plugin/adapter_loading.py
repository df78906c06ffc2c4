# SPDX-License-Identifier: Apache-2.0
"""Load a LoRA adapter into a running vLLM, replacing the previous one, and verify that.

vLLM only reports that an adapter was read. It skips a matrix that no layer has without an error,
and a worker that lost the adapter loads, with the next request, whatever is at the request's path.
So the buffers that its kernels read are compared before and after, as for other weights. Next:
loaded_state.py.
"""

import json
from pathlib import Path
from typing import Any

from jaxmoe.vllm.plugin import manifest
from jaxmoe.vllm.plugin.live_parameters import digest_parameters
from jaxmoe.vllm.plugin.loaded_state import ExpectedParameter
from jaxmoe.vllm.plugin.names import ADAPTER_ID, ADAPTER_NAME, adapter_buffer_names
from jaxmoe.vllm.plugin.transfer import check_digests, read_tensors

CONFIG_FILE = "adapter_config.json"


def load_adapter(worker: Any, directory: Path) -> None:
    """Check and load an adapter in PEFT's format with a manifest; only this adapter is served then.

    Call it after vLLM's finish_weight_update, which drops every adapter. Raises UpdateRejected,
    naming tensors, before anything is changed.
    """
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    manifest.check_folder_owner(directory)
    expected = manifest.read_manifest(directory)
    received = check_digests(expected, dict(read_tensors(expected, directory)))
    buffer_names = adapter_buffer_names(
        list(expected.tensors), json.loads((directory / CONFIG_FILE).read_text())
    )
    model = worker.model_runner.get_model()
    before, _ = digest_parameters(model)
    manifest.reject_problems(
        expected.label,
        [
            f"{name} has no layer in this vLLM that could apply it"
            for name, buffer in buffer_names.items()
            if buffer not in before
        ],
    )
    state = worker.weight_transfer_engine.loaded_state
    # From here on an error may leave a part of either adapter.
    state.invalidate()
    # Every version has the same id, for which vLLM would otherwise keep the adapter that it has.
    worker.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(directory), load_inplace=True))
    expected_parameters = {
        name: ExpectedParameter(received[name], False, buffer_names[name]) for name in received
    }
    state.record_update(
        expected.label, received, expected_parameters, before, *digest_parameters(model)
    )
