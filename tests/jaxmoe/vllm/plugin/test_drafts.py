# SPDX-License-Identifier: Apache-2.0
"""A vLLM's workers report its drafts, and the trainer refuses them.

Drafts need Triton, which vLLM does not have on a CPU: here the worker of a vLLM without them gets
the config of one with them.
"""

from types import SimpleNamespace

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.vllm.client.sync import read_workers
from jaxmoe.vllm.client.worker_state import check_worker_states

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def add_drafts(worker):
    from vllm.config import SpeculativeConfig

    drafts = SpeculativeConfig.__new__(SpeculativeConfig)  # its checks need a model for drafts
    drafts.method = "ngram"
    worker.vllm_config.speculative_config = drafts


def remove_drafts(worker):
    worker.vllm_config.speculative_config = None


def test_a_vllm_with_drafts_is_refused(served):
    def loaded_state():
        return check_worker_states(served.llm.collective_rpc("jaxmoe_loaded_state"))

    backend = SimpleNamespace(name="it", loaded_state=loaded_state)
    assert len(read_workers(backend).names) == 1
    served.llm.collective_rpc(add_drafts)
    try:
        with pytest.raises(ConfigError, match="it must sample without speculative.*has 'ngram'"):
            read_workers(backend)
    finally:
        served.llm.collective_rpc(remove_drafts)
