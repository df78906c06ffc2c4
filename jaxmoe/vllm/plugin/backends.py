# SPDX-License-Identifier: Apache-2.0
"""The weight transfer backends that vLLM looks up, or placeholders that raise the reason."""

from jaxmoe.vllm.plugin import compat

_UNSUPPORTED = compat.find_missing_api()

if _UNSUPPORTED is None:
    from jaxmoe.vllm.plugin.direct import IpcTransfer, NcclTransfer
    from jaxmoe.vllm.plugin.transfer import FileTransfer
else:

    class Unavailable:
        """Placeholder for an engine: creating it raises the reason, which stops vLLM."""

        def __init__(self, *_: object) -> None:
            raise RuntimeError(_UNSUPPORTED)

    FileTransfer = IpcTransfer = NcclTransfer = Unavailable

__all__ = ["FileTransfer", "IpcTransfer", "NcclTransfer"]
