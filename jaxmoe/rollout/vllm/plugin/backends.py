# SPDX-License-Identifier: Apache-2.0
"""The weight transfer backends as vLLM looks them up, or the reason why there are none."""

from jaxmoe.rollout.vllm.plugin import known

_REASON = known.missing()

if _REASON is None:
    from jaxmoe.rollout.vllm.plugin.direct import Ipc, Nccl
    from jaxmoe.rollout.vllm.plugin.transfer import Files
else:

    class Unavailable:
        """Stands where an engine would; vLLM stops with its reason."""

        def __init__(self, *_: object) -> None:
            raise RuntimeError(_REASON)

    Files = Ipc = Nccl = Unavailable

__all__ = ["Files", "Ipc", "Nccl"]
