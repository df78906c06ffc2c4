# SPDX-License-Identifier: Apache-2.0
"""Compile for a chip that is not there: the real TPU and GPU compilers, on any Linux machine.

Interpreters accept tiles that no chip has; these compilers do not. Nothing is executed. Needs
`pip install 'jaxmoe[compilers]'` and CHIPS names what can be compiled for.
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

TPUS = {  # name: the smallest topology of the chip, and what limits a host to one
    "v5e": ("v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "tpu7x": ("tpu7x:2x2x1", {}),
}


@dataclass(frozen=True)
class Gpu:
    """What XLA asks about a GPU; vendor's figures."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_per_core: int  # bytes; a block may have 1 KiB less
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
    """What ptxas said of one kernel, and what is asked for at its launch."""

    registers: int  # per thread
    spills: int  # bytes stored and loaded
    stack: int  # bytes
    shared: int = 0  # bytes of shared memory for each block of threads
    warnings: tuple[str, ...] = ()  # as of tensor cores that must wait for each product


@dataclass(frozen=True)
class Compiled:
    """An executable for `chip`, and what the kernels in it take."""

    chip: str
    executable: jax.stages.Compiled
    kernels: tuple[Ptxas, ...]  # Mosaic GPU kernels compiled now, in this order

    @property
    def _text(self) -> str:
        return self.executable.as_text() or ""

    @property
    def mosaic_calls(self) -> int:
        """Calls of Mosaic GPU kernels, those left out of `kernels` too."""
        return self._text.count('custom_call_target="mosaic_gpu')

    @property
    def vmem_bytes(self) -> tuple[int, ...]:
        """Vector memory of each Mosaic TPU kernel."""
        calls = (x for x in self._text.splitlines() if "tpu_custom_call" in x)
        used = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
        return tuple(int(size) for call in calls for size in re.findall(used, call))

    @property
    def temp_bytes(self) -> int:
        """Device memory beside arguments and results."""
        analysis = self.executable.memory_analysis()
        if analysis is None:
            raise NotImplementedError(f"the compiler for {self.chip} does not tell memory.")
        return analysis.temp_size_in_bytes


def mesh_of(chip: str) -> Mesh:
    """One device of the chip. Raises NotImplementedError where its compiler is not installed."""
    if chip not in CHIPS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}; got {chip!r}.")
    devices = _topology(chip, *TPUS[chip]) if chip in TPUS else _topology(chip, "1x1")
    return Mesh(np.array(devices[:1]), ("chip",))


def topology_of(name: str) -> tuple[str, list[Any]]:
    """The chip and the devices of a whole machine: v5p:4x4x4 of TPUs, h200:2x8 of 2 hosts of 8.

    Raises: ValueError for what no compiler knows, with its word; NotImplementedError where the
    compiler is not installed.
    """
    chip, _, layout = name.partition(":")
    if chip in TPUS:
        one, options = TPUS[chip]
        return chip, _topology(chip, name, options if name == one else {})
    if chip not in GPUS or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", layout):
        raise ValueError(
            f"it knows {', '.join(TPUS)} (as v5e:2x4) and {', '.join(GPUS)} (as h200:2x8)"
        )
    return chip, _topology(chip, layout)


def _topology(
    chip: str, layout: str, options: Mapping[str, Any] = MappingProxyType({})
) -> list[Any]:
    """Devices of libtpu's name of a topology, or of HOSTSxGPUS."""
    # libtpu asks a cloud host who it is, and locks itself; neither is for a mere compilation.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        if chip in TPUS:
            return list(topologies.get_topology_desc(layout, "tpu", **options).devices)
        _wheel_tools_first()
        return list(
            topologies.get_topology_desc(
                platform="cuda", target_config=_target_config(GPUS[chip]), topology=f"1x{layout}"
            ).devices
        )
    except Exception as error:
        said = str(error).splitlines()[0]
        if said.startswith("INVALID_ARGUMENT"):
            raise ValueError(said.partition(": ")[2]) from error
        raise NotImplementedError(
            f"compiling for {chip} needs its compiler: {said}. Try pip install 'jaxmoe[compilers]'."
        ) from error


def _wheel_tools_first() -> None:
    """The wheels' ptxas before an older toolkit's on PATH, which refuses newer PTX."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        tools, path = str(Path(folder, "bin")), os.environ.get("PATH", os.defpath)
        if Path(tools, "ptxas").exists() and path.split(os.pathsep)[0] != tools:
            os.environ["PATH"] = tools + os.pathsep + path


def missing(chip: str) -> str | None:
    """Why nothing can be compiled for the chip here; None where it can."""
    try:
        mesh_of(chip)
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

    What the arguments numbered in `donate` hold is given to the results. What Mosaic GPU says of
    its kernels is kept in `dump`, an empty folder, if one is given.

    Mosaic's GPU compiler keeps the first architecture of a process: one generation per process.
    Some versions of JAX (0.10, 0.12) keep its kernels as well: those that this process compiled
    before, in another function too, are not in `kernels`, and still in `mosaic_calls`.

    Raises: NotImplementedError where the compiler is missing; whatever the compiler refuses.
    """
    mesh = mesh_of(chip)
    here = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), args)
    with _mosaic_dump(dump) as folder:
        executable = compile_on(mesh, fn, *abstract, donate_argnums=donate)
        kernels = tuple(
            replace(read_ptxas(p.read_text()), shared=_shared_bytes(p))
            for p in sorted(folder.glob("*.ptxas"))
        )
    return Compiled(chip, executable, kernels)


def compile_on(
    mesh: Mesh, fn: Callable[..., Any], *args: Any, **options: Any
) -> jax.stages.Compiled:
    """`jax.jit(fn, **options)` of ShapeDtypeStructs that say where on the mesh they lie."""
    return compile_jitted(mesh, jax.jit(fn, **options), *args)


def compile_jitted(mesh: Mesh, jitted: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
    """As `compile_on`, of what jit returned; `static` are those of its arguments that are."""
    there = mesh.devices.flat[0].platform
    platform = there if there in ("tpu", "cpu") else "cuda"
    with jax.set_mesh(mesh), _not_kept():
        return jitted.trace(*args, **static).lower(lowering_platforms=(platform,)).compile()


def read_ptxas(text: str) -> Ptxas:
    """The figures in the output of `ptxas -v` for one kernel."""

    def number(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, text))

    return Ptxas(
        registers=number(r"Used (\d+) registers"),
        spills=number(r"(\d+) bytes spill"),
        stack=number(r"(\d+) bytes stack frame"),
        warnings=tuple(x for x in text.splitlines() if "warning" in x or "Performance Loss" in x),
    )


def _shared_bytes(dumped: Path) -> int:
    """Of the kernel whose other dumps lie beside: the constant in its launch."""
    stem = dumped.name.removesuffix("ptxas")
    for path in sorted(dumped.parent.glob(f"{stem}*")):  # the text of one pass before all of them
        with path.open(errors="replace") as lines:
            for line in lines:
                found = re.search(r"dynamic_shared_memory_size %c(\d+)", line)
                if found:
                    return int(found[1])
    return 0


@contextlib.contextmanager
def _not_kept() -> Iterator[None]:
    """Nothing goes into JAX's folder of compiled programs: one read back tells other memory."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _mosaic_dump(kept: Path | None) -> Iterator[Path]:
    """A folder where Mosaic GPU leaves what ptxas says."""
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    with tempfile.TemporaryDirectory() as folder:
        folder = str(kept or folder)
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("MOSAIC_GPU_DUMP_TO")
            if before is not None:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before


def _target_config(gpu: Gpu) -> str:
    major, minor = gpu.capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
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
