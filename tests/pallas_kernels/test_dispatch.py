# SPDX-License-Identifier: Apache-2.0
"""auto may fall back, and logs so once; a named implementation never does."""

import logging
import sys

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, select_implementation


def fast(*_):
    return "fast"


def plain(*_):
    return "plain"


def odd_is_bad(length):
    return "the length must be even" if length % 2 else None


def anything(_length):
    return None


IMPLS = {
    "elsewhere": Implementation(fast, anything, ("no such platform",)),
    "fast": Implementation(fast, odd_is_bad),
    "plain": Implementation(plain, anything),
}


def test_auto_takes_the_first_that_runs_here():
    assert select_implementation("auto", IMPLS, 4)() == "fast"
    assert select_implementation("auto", IMPLS, 5)() == "plain"


def test_auto_says_once_what_it_chose_and_why(caplog):
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for _ in range(3):
            select_implementation("auto", IMPLS, 5)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "fast: the length must be even" in message and "elsewhere: it needs" in message
    assert plain.__module__ in message


def test_auto_leaves_out_unproven_kernels(caplog):
    dispatch._log_once.cache_clear()
    lazy = dispatch.lazy_implementation(
        __name__, "fast", ("cpu", "gpu", "tpu"), "anything", proven=False
    )
    impls = {"new": lazy, "plain": IMPLS["plain"]}
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        assert select_implementation("auto", impls, 4) is plain
    assert (
        "new: interpreted and compiled, but never run on a chip" in caplog.records[0].getMessage()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch.importlib, "import_module", lambda name: sys.modules[__name__])
        assert select_implementation("new", impls, 4)() == "fast"


def test_a_named_implementation_never_falls_back():
    assert select_implementation("plain", IMPLS, 4)() == "plain"
    with pytest.raises(NotImplementedError, match="the length must be even"):
        select_implementation("fast", IMPLS, 5)
    with pytest.raises(NotImplementedError, match="it needs no such platform, this is "):
        select_implementation("elsewhere", IMPLS, 4)


def test_the_first_named_that_runs_is_taken():
    new = {"new": Implementation(fast, odd_is_bad, proven=False), **IMPLS}
    assert (
        select_implementation(("new", "plain"), new, 4) is fast
        and select_implementation(("new", "plain"), new, 5) is plain
    )
    with pytest.raises(NotImplementedError, match="must be even; the length must be even"):
        select_implementation(("new", "fast"), new, 5)
    with pytest.raises(ValueError, match="got 'plian'. Did you mean 'plain'"):
        select_implementation(("plian", "fast"), new, 4)
    with pytest.raises(ValueError, match=r"must name an implementation, got \(\)"):
        select_implementation((), new, 4)


def test_no_runnable_kernel_names_every_reason():
    with pytest.raises(NotImplementedError, match="fast: the length must be even"):
        select_implementation("auto", {"fast": IMPLS["fast"]}, 5)


def test_an_unknown_name_asks_what_was_meant():
    with pytest.raises(ValueError, match="Did you mean 'plain'"):
        select_implementation("plian", IMPLS, 4)
    with pytest.raises(ValueError, match="Known: auto, elsewhere, fast, plain"):
        select_implementation("zzz", IMPLS, 4)


def test_the_mesh_decides_the_target():
    assert dispatch.target_device().platform == jax.default_backend()
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert (
            dispatch.target_device() == ("gpu", "NVIDIA H200")
            and dispatch.target_device().is_hopper
        )
        gpu_only = {"gpu": Implementation(fast, anything, ("gpu",)), **IMPLS}
        assert select_implementation("auto", gpu_only, 4) is fast
    assert not dispatch.Target("gpu", "NVIDIA A100-SXM4-80GB").is_hopper
