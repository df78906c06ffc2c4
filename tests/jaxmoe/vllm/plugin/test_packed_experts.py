# SPDX-License-Identifier: Apache-2.0
"""A vLLM that holds dense experts refuses those in four bits.

tests/jaxmoe/vllm/engine/test_packed_experts_vllm.py has a vLLM that takes them: it ends with its
test, and with it the process group of all vLLMs of a process.
"""

from dataclasses import replace

import pytest
from random_weights import random_weights

from jaxmoe.model.rounded import round_experts
from jaxmoe.weight_sync.files import write_files

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_an_update_of_another_form_changes_nothing(served):
    before = served.sync(served.fresh())
    cfg = replace(served.cfg, d_model=128)  # which four bits hold
    packed = round_experts(random_weights(cfg, 1))
    update = write_files(
        packed, cfg, served.home, dtype="float32", run="cd", version=1, experts="packed"
    )
    with pytest.raises(Exception, match="vLLM's experts are dense, those of the update mxfp4"):
        served.update(update.update_info)
    assert served.loaded_state()["live"] == before["live"]
