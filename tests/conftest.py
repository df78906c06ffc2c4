# SPDX-License-Identifier: Apache-2.0
"""Strict arithmetic for every test. Imports nothing of the project: the typing hook comes first."""

import atexit
import gc
import inspect
import os
import shutil
import sys
import tempfile
import threading
from functools import partial, partialmethod
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from tests.kept_programs import keep_programs, link_kept_programs, open_programs, read_program

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

# Compiling is most of what tests cost, of programs that run once: here LLVM optimises nothing, and
# in jax 0.10 XLA takes its older and quicker emitters, which later versions do not have, and cuts
# no program into parts: none is worth a thread or XNNPACK. One assertion depends on it
# and says so (equal bits, test_decode_attention_kernels.py). With `XLA_FLAGS=` before the command
# everything compiles as users do; so do tests on a chip and for one (-m aot, -m "aot and …", but
# not "… and not aot").
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_multi_thread_eigen=false"  # or devices block each other: distributed/host.py
    + (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        " --xla_cpu_use_xnnpack=false"
    )
    * version("jaxlib").startswith("0.10.")
    if os.environ["JAX_PLATFORMS"] == "cpu" and not any(x.startswith("aot") for x in sys.argv)
    else "",
)

# What one test compiled the next need not, nor does the next run of pytest: a worker and the
# commands that its tests start share a folder of programs. Not two workers, which would read what
# the other one writes.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ and not any(x.startswith("aot") for x in sys.argv):
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxmoe-tests"
    try:
        programs = open_programs(cache)
        atexit.register(keep_programs, cache, programs)
        os.environ["JAXMOE_KEPT_PROGRAMS"] = str(cache)
    except OSError:  # a home that cannot be written
        programs = Path(tempfile.mkdtemp(prefix="jaxmoe-tests-"))
        atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["JAXMOE_TEST_PROGRAMS"] = str(programs)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # to keep one takes 12 ms
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")  # they name the folder
if "JAXMOE_TEST_PROGRAMS" in os.environ:
    programs = Path(os.environ["JAXMOE_TEST_PROGRAMS"], os.environ.get("PYTEST_XDIST_WORKER", ""))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    if "JAXMOE_KEPT_PROGRAMS" in os.environ:
        link_kept_programs(Path(os.environ["JAXMOE_KEPT_PROGRAMS"]), programs)

# A worker with all cores spends a third of its time in XLA's threads, which wait for each other.
if (
    hasattr(os, "sched_setaffinity")
    and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)) >= len(os.sched_getaffinity(0)) > 1
):
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})

import jax
import jaxtyping
from hypothesis import settings
from jax._src.interpreters import mlir
from jax._src.lru_cache import LRUCache
from jaxlib.mlir import ir

# Most programs are single operations, run eagerly. They are kept too, from this process alone (a
# command could read what another one has written half of), and in jax 0.10 the lowerings of a
# thread share a context: to make one takes as long as all the rest of a small one.
if "JAXMOE_KEPT_PROGRAMS" in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    read_kept = partialmethod(read_program, LRUCache.get, os.environ["JAXMOE_KEPT_PROGRAMS"])
    patch.object(LRUCache, "get", read_kept).start()
contexts, make_context = threading.local(), mlir.make_ir_context


def share_context():
    """Return the thread's MLIR context, a new one every hundred times: it frees nothing before.

    An operation run in the middle of a lowering has its own, or it is put into that program."""
    if ir.Context.current:
        return make_context()
    contexts.uses = getattr(contexts, "uses", -1) + 1
    if contexts.uses % 100 == 0:
        contexts.context = make_context()
    return contexts.context


if jax.__version__.startswith("0.10."):
    mlir.make_ir_context = share_context

# pyproject.toml has every call checked, for shapes and dtypes. Functions without arrays are left
# as they are: their checks were four fifths of what configs and plans took.
check_types = jaxtyping.jaxtyped


def check_arrays(*fn, typechecker):
    """Check calls of what names arrays: a function, a method, a property or a dataclass."""
    if not fn:
        return partial(check_arrays, typechecker=typechecker)
    function = getattr(fn[0], "fget", None) or getattr(fn[0], "__func__", fn[0])
    names_arrays = "jaxtyping." in str(inspect.get_annotations(function))
    return check_types(*fn, typechecker=typechecker) if names_arrays else fn[0]


jaxtyping.jaxtyped = check_arrays

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# tracing makes millions of objects that stay: looking through them is a tenth of the time
gc.set_threshold(100_000, 50, 100)

settings.register_profile("quick", max_examples=12, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=2000, deadline=None, derandomize=True)
settings.load_profile("quick")
