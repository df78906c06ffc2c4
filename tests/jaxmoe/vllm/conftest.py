# SPDX-License-Identifier: Apache-2.0
"""The vLLMs that the engine's tests run against."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmoe.config import VllmConfig

TESTS_DIR = Path(__file__).parent
ROOMS = (TESTS_DIR / "client", TESTS_DIR / "engine")
sys.path.insert(0, str(TESTS_DIR))  # stand_in, proxy, vllm_cases

from proxy import Proxy  # noqa: E402
from stand_in import StandIn  # noqa: E402
from vllm_cases import CFG, open_engine, weights  # noqa: E402


def pytest_collection_modifyitems(items):
    """Ignore the warnings of vLLM's own packages."""
    for item in items:
        if item.path.parent in ROOMS and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module")
def stand_in():
    vllm_engine = StandIn(CFG)
    yield vllm_engine
    vllm_engine.crash()


@pytest.fixture
def fresh():
    """A stand-in that a test may break, behind a proxy."""
    server = StandIn(CFG)
    proxy = Proxy(server.url)
    yield SimpleNamespace(server=server, proxy=proxy, url=proxy.url)
    proxy.close()
    server.crash()


@pytest.fixture(
    scope="module",
    params=[
        "stand_in",
        pytest.param("server", marks=pytest.mark.vllm),
        pytest.param("in_process", marks=pytest.mark.vllm),
    ],
)
def engine(request, tmp_path_factory):
    """The same tests for the stand-in, a real server and a real vLLM in this process."""
    work = tmp_path_factory.mktemp("engine")
    if request.param == "stand_in":
        vllm_engine = open_engine(request.getfixturevalue("stand_in").url, work)
    else:
        launch = 1 if request.param == "server" else 0
        vllm_engine = open_engine("", work, launch=launch, weights_dir=VllmConfig().weights_dir)
    vllm_engine.load(weights(0), 3)
    yield vllm_engine
    vllm_engine.close()


@pytest.fixture(params=["stand_in", pytest.param("in_process", marks=pytest.mark.vllm)])
def opened(request, tmp_path):
    """A factory of engines by on_weight_sync; the stand-in is slow, so syncs meet responses."""
    closes = []

    def make(mode):
        if request.param == "in_process":
            vllm_engine = open_engine("", tmp_path, launch=0, on_weight_sync=mode)
        else:
            server = StandIn(CFG, delay=0.004)
            closes.append(server.crash)
            vllm_engine = open_engine(server.url, tmp_path, on_weight_sync=mode)
        closes.insert(0, vllm_engine.close)
        return vllm_engine

    yield make
    for close in closes:
        close()
