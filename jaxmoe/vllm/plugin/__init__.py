# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside vLLM's processes: it loads new weights and reports what is loaded.

vLLM finds `register` by the entry point `vllm.general_plugins`. Nothing here imports jax, so that
`pip install --no-deps jaxmoe` is enough in vLLM's own environment. Next: transfer.py receives a
weight update, worker.py reports what is loaded.
"""

import logging
import os


def register() -> None:
    """Register the plugin; vLLM calls this in each of its processes, in some of them twice.

    A vLLM whose internals differ from the tested ones is left unchanged; selecting the weight
    transfer backend "jaxmoe" then fails with the reason.
    """
    from jaxmoe.vllm.plugin import compat, watchdog

    if pid := os.environ.get(watchdog.PARENT_PID_VARIABLE):
        watchdog.watch_process(int(pid))
    if warning := compat.version_warning():
        logging.getLogger(__name__).warning("%s", warning)
    compat.register_backends()
    if compat.find_missing_api() is None:
        from jaxmoe.vllm.plugin import adapters_on_cpu, routed_experts, seeds

        adapters_on_cpu.patch_adapters_on_cpu()
        seeds.patch_seeded_requests()
        routed_experts.patch_routed_experts()
