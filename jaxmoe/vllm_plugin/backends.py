# SPDX-License-Identifier: Apache-2.0
"""The weight transfer backends as vLLM looks them up, or the reason why there are none."""

from jaxmoe.vllm_plugin import compat

_REASON = compat.missing()

if _REASON is None:
    from jaxmoe.vllm_plugin.direct import IpcTransfer, NcclTransfer
    from jaxmoe.vllm_plugin.transfer import FileTransfer
else:

    class Unavailable:
        """Stands where an engine would; vLLM stops with its reason."""

        def __init__(self, *_: object) -> None:
            raise RuntimeError(_REASON)

    FileTransfer = IpcTransfer = NcclTransfer = Unavailable

__all__ = ["FileTransfer", "IpcTransfer", "NcclTransfer"]
