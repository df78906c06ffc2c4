# SPDX-License-Identifier: Apache-2.0
"""A vLLM that the plugin does not know is left alone, and told why; vLLM itself is not needed."""

import subprocess
import sys
import types

import pytest

from jaxmoe.vllm.plugin import compat


@pytest.fixture
def fresh():
    compat.find_missing_api.cache_clear()
    yield
    compat.find_missing_api.cache_clear()


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.9.dev3", "0.33.0+cpu"])
def test_a_tested_version_is_taken_without_a_word(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    assert compat.version_warning() is None


@pytest.mark.parametrize("version", ["0.34.0", "0.3.2", "0.320.1", "of unknown version"])
def test_another_version_is_named_with_what_to_type(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    warning = compat.version_warning()
    assert warning is not None and version in warning and "pip install 'vllm==0.33.*'" in warning


def test_missing_internals_are_named_by_the_backend(monkeypatch, fresh):
    added = {}

    class Factory:
        @staticmethod
        def register_engine(name, module, engine):
            if name in added:
                raise ValueError(name)
            added[name] = (module, engine)

    home = "vllm.distributed.weight_transfer"
    modules = {
        "vllm": types.ModuleType("vllm"),
        "vllm.distributed": types.ModuleType("vllm.distributed"),
        home: types.ModuleType(home),
        home + ".base": types.ModuleType(home + ".base"),
        home + ".factory": types.SimpleNamespace(WeightTransferEngineFactory=Factory),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jaxmoe.vllm.plugin.backends", raising=False)
    reason = compat.find_missing_api()
    assert reason is not None and f"needs {home}.base.WeightTransferEngine," in reason
    compat.register_backends()
    compat.register_backends()  # vLLM loads plugins in some processes twice
    assert set(added) == {"jaxmoe", "jaxmoe_nccl", "jaxmoe_ipc"}
    import importlib

    for module, engine in added.values():
        with pytest.raises(RuntimeError, match="pip install 'vllm==0.33"):
            getattr(importlib.import_module(module), engine)(None, None, None, None)
    monkeypatch.delitem(sys.modules, "jaxmoe.vllm.plugin.backends")


@pytest.mark.vllm
def test_a_real_vllm_has_all_internals_without_jax():
    code = """
import subprocess
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins", name="jaxmoe")
register = entry.load()
register(); register()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
for backend in ("jaxmoe", "jaxmoe_nccl", "jaxmoe_ipc"):
    assert issubclass(Factory._registry[backend](), WeightTransferEngine), backend
from jaxmoe.vllm.plugin import compat, worker
assert compat.find_missing_api() is None, compat.find_missing_api()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
