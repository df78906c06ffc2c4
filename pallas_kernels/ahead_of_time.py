# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation for chips that this machine does not have, on any Linux machine.

Interpreters accept tile shapes that no chip supports; the real TPU and GPU compilers do not.
Nothing is executed. Needs `pip install 'jaxmoe[compilers]'`. CHIPS lists the supported chips.
"""

import contextlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TPUS = {  # name: the smallest topology of the chip, and the options for one chip per host
    "v5e": ("v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "tpu7x": ("tpu7x:2x2x1", {}),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties that XLA's compiler reads; figures of the vendor."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_per_core: int  # bytes; one block of threads can use 1 KiB less
    memory_gb: int
    bandwidth_gbs: int
    l2: int  # bytes
    clock_ghz: float


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 85, 2039, 41943040, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 85, 3350, 52428800, 1.98),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 233472, 151, 4800, 52428800, 1.98),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 233472, 192, 8000, 132644864, 1.97),
}

CHIPS = (*TPUS, *GPUS)


@dataclass(frozen=True)
class Ptxas:
    """Resources of one kernel: the report of ptxas, and the shared memory of its launch."""

    registers: int  # per thread
    spills: int  # bytes stored and loaded
    stack: int  # bytes
    shared: int = 0  # bytes of dynamic shared memory for each block of threads
    warnings: tuple[str, ...] = ()  # for example, of serialised wgmma instructions


@dataclass(frozen=True)
class Compiled:
    """An executable for `chip`, and the resources of its kernels."""

    chip: str
    executable: jax.stages.Compiled
    kernels: tuple[Ptxas, ...]  # Mosaic GPU kernels that this call compiled, in order

    @property
    def _hlo_text(self) -> str:
        return self.executable.as_text() or ""

    @property
    def mosaic_calls(self) -> int:
        """Number of calls of Mosaic GPU kernels, including kernels that `kernels` omits."""
        return self._hlo_text.count('custom_call_target="mosaic_gpu')

    @property
    def vmem_bytes(self) -> tuple[int, ...]:
        """Vector memory of each Mosaic TPU kernel, bytes."""
        calls = (x for x in self._hlo_text.splitlines() if "tpu_custom_call" in x)
        used = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
        return tuple(int(size) for call in calls for size in re.findall(used, call))

    @property
    def temp_bytes(self) -> int:
        """Device memory in addition to arguments and results, bytes."""
        analysis = self.executable.memory_analysis()
        if analysis is None:
            raise NotImplementedError(f"the compiler for {self.chip} does not report memory.")
        return analysis.temp_size_in_bytes


def chip_mesh(chip: str) -> Mesh:
    """A mesh of one device of the chip.

    Raises: ValueError for an unknown chip; NotImplementedError if its compiler is not installed.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}; got {chip!r}.")
    devices = (
        _topology_devices(chip, *TPUS[chip]) if chip in TPUS else _topology_devices(chip, "1x1")
    )
    return Mesh(np.array(devices[:1]), ("chip",))


def parse_topology(name: str) -> tuple[str, list[Any]]:
    """The chip and all devices of a topology: v5p:4x4x4 is of TPUs, h200:2x8 two hosts of 8 GPUs.

    Raises: ValueError for a topology that the compiler rejects, with its message;
    NotImplementedError if the compiler is not installed.
    """
    chip, _, layout = name.partition(":")
    if chip in TPUS:
        smallest, options = TPUS[chip]
        return chip, _topology_devices(chip, name, options if name == smallest else {})
    if chip not in GPUS or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", layout):
        raise ValueError(
            f"known chips are {', '.join(TPUS)} (as v5e:2x4) and {', '.join(GPUS)} (as h200:2x8)"
        )
    return chip, _topology_devices(chip, layout)


def _topology_devices(
    chip: str, layout: str, options: Mapping[str, Any] = MappingProxyType({})
) -> list[Any]:
    """Devices of a topology: libtpu's name of one, or HOSTSxGPUS."""
    # libtpu queries the cloud host's metadata and takes a lock. Compilation needs neither.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        if chip in TPUS:
            return list(topologies.get_topology_desc(layout, "tpu", **options).devices)
        _prefer_wheel_ptxas()
        return list(
            topologies.get_topology_desc(
                platform="cuda", target_config=_target_config(GPUS[chip]), topology=f"1x{layout}"
            ).devices
        )
    except Exception as error:
        message = str(error).splitlines()[0]
        if message.startswith("INVALID_ARGUMENT"):
            raise ValueError(message.partition(": ")[2]) from error
        raise NotImplementedError(
            f"compiling for {chip} needs its compiler: {message}. "
            "Try pip install 'jaxmoe[compilers]'."
        ) from error


def _prefer_wheel_ptxas() -> None:
    """Put the ptxas of the wheels first on PATH: an older toolkit's rejects newer PTX."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        tools, path = str(Path(folder, "bin")), os.environ.get("PATH", os.defpath)
        if Path(tools, "ptxas").exists() and path.split(os.pathsep)[0] != tools:
            os.environ["PATH"] = tools + os.pathsep + path


def compiler_unavailable(chip: str) -> str | None:
    """The reason why this machine cannot compile for the chip, or None."""
    try:
        chip_mesh(chip)
    except NotImplementedError as error:
        return str(error)
    return None


def compile_for(
    chip: str,
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    dump: Path | None = None,
) -> Compiled:
    """Compile `fn` for one device of the chip; `args` are arrays or ShapeDtypeStructs.

    The arguments whose numbers are in `donate` are donated. Mosaic GPU writes its dumps of the
    kernels to `dump`, an empty folder, if one is given.

    Mosaic's GPU compiler caches the first architecture of a process, so compile for one GPU
    generation per process. Some versions of JAX (0.10, 0.12) also cache its kernels: a kernel that
    this process compiled before is missing from `kernels`, but is counted in `mosaic_calls`.

    Raises: NotImplementedError if the compiler is missing; errors of the compiler as they are.
    """
    mesh = chip_mesh(chip)
    replicated = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), args
    )
    with _mosaic_dump(dump) as folder:
        executable = compile_on(mesh, fn, *abstract, donate_argnums=donate)
        kernels = tuple(
            replace(parse_ptxas(p.read_text()), shared=_read_shared_bytes(p))
            for p in sorted(folder.glob("*.ptxas"))
        )
    return Compiled(chip, executable, kernels)


def compile_on(
    mesh: Mesh, fn: Callable[..., Any], *args: Any, **options: Any
) -> jax.stages.Compiled:
    """Compile `jax.jit(fn, **options)` for ShapeDtypeStructs with shardings on the mesh."""
    return compile_jitted(mesh, jax.jit(fn, **options), *args)


def compile_jitted(mesh: Mesh, jitted: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
    """Compile a jitted function as `compile_on` does; `static` are its static arguments."""
    target_platform = mesh.devices.flat[0].platform
    platform = target_platform if target_platform in ("tpu", "cpu") else "cuda"
    # Pallas reads from the mesh which generation of the chip it lowers for.
    with jax.set_mesh(mesh), _without_compilation_cache():
        return jitted.trace(*args, **static).lower(lowering_platforms=(platform,)).compile()


def parse_ptxas(text: str) -> Ptxas:
    """The figures in the output of `ptxas -v` for one kernel."""

    def sum_matches(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, text))

    return Ptxas(
        registers=sum_matches(r"Used (\d+) registers"),
        spills=sum_matches(r"(\d+) bytes spill"),
        stack=sum_matches(r"(\d+) bytes stack frame"),
        warnings=tuple(x for x in text.splitlines() if "warning" in x or "Performance Loss" in x),
    )


def _read_shared_bytes(dumped: Path) -> int:
    """Bytes of dynamic shared memory, a constant of the kernel's launch in the other dumps."""
    stem = dumped.name.removesuffix("ptxas")
    for path in sorted(dumped.parent.glob(f"{stem}*")):  # the dump of one pass suffices
        with path.open(errors="replace") as lines:
            for line in lines:
                match = re.search(r"dynamic_shared_memory_size %c(\d+)", line)
                if match:
                    return int(match[1])
    return 0


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Disable JAX's persistent cache: an executable read from it reports other memory sizes."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _mosaic_dump(dump: Path | None) -> Iterator[Path]:
    """The folder to which Mosaic GPU writes the reports of ptxas: `dump`, or a temporary one."""
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    with tempfile.TemporaryDirectory() as folder:
        folder = str(dump or folder)
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("MOSAIC_GPU_DUMP_TO")
            if before is not None:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before


def _target_config(gpu: Gpu) -> str:
    major, minor = gpu.capability
    # wgmma is an architecture-specific feature: it exists in sm_90a, not in sm_90.
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    # Pallas derives the compute capability from the name, so it must be the vendor's.
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {gpu.shared_per_core - 1024}
  shared_memory_per_core: {gpu.shared_per_core}  core_count: {gpu.cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: {gpu.bandwidth_gbs * 10**9}  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_gb * 10**9}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation"  device_address_bits: 64  name: "{gpu.name}"
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
