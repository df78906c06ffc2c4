# SPDX-License-Identifier: Apache-2.0
"""What runs inside vLLM's processes: it loads new weights and reports what is loaded.

vLLM finds `register` by the entry point `vllm.general_plugins`. Nothing here imports jax, so that
`pip install --no-deps jaxmoe` is enough in vLLM's own environment.
Next: transfer.py receives a weight update, worker.py reports what is loaded.
"""

import logging
import os


def register() -> None:
    """Called by vLLM in each of its processes, in some of them twice.

    A vLLM whose internals are not the tested ones is left as it is; asking it for the weight
    transfer backend "jaxmoe" then says why there is none.
    """
    from jaxmoe.vllm_plugin import compat, watchdog

    if pid := os.environ.get(watchdog.VARIABLE):
        watchdog.watch(int(pid))
    if warning := compat.version_warning():
        logging.getLogger(__name__).warning("%s", warning)
    compat.add_backends()
    if compat.missing() is None:
        from jaxmoe.vllm_plugin import adapters_on_cpu, routed_experts, seeds

        adapters_on_cpu.install()
        seeds.install()
        routed_experts.install()
