# SPDX-License-Identifier: Apache-2.0
"""Four trainer processes and two vLLM servers; one is killed, another takes its place later."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from proxy import Proxy
from vllm_cases import PYTHON

from jaxmoe.config import VllmConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.processes import PROCESS_VARIABLES
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.vllm.engine.server import Server, _find_free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[4]
STEPS, WAIT_S = 12, 900
CHANGES = [
    "model.d_model=64",
    "model.d_expert=32",
    "data.train_rows=64",
    "data.held_out_rows=6",
    "warmup.steps=3",
    "warmup.sequences_per_step=16",
    "rollout.sequences_per_step=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_gen_batches=1",
    f"steps={STEPS}",
    "eval.every_steps=6",
    "save.every_steps=6",
    "rollout.vllm.request_timeout_s=60",
    "data.rewards=uneven:reward",
]
# random models' answers differ in it, so that there is something to learn
REWARD = """
def reward(completions, **_):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""
REPORTED = "tests.jaxmoe.reported_training"


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Servers of one key; two have an address that stays, the third is for later."""
    work, key = tmp_path_factory.mktemp("servers"), secrets.token_urlsafe(16)
    cfg = override(load_config("tiny_vllm.py"), *CHANGES)
    with ExitStack() as closing:
        servers = []
        for number in range(3):
            server = Server(
                VllmConfig(python=PYTHON),
                cfg.model,
                work=work,
                number=number,
                context=cfg.context,
                rows=cfg.rollout.max_parallel_sequences,
            )
            server.key = key
            closing.callback(server.stop)
            servers.append(server)
        with ThreadPoolExecutor(3) as pool:
            for backend in pool.map(Server.start, servers):
                backend.close()
        proxies = [
            Proxy(server.url, dict.fromkeys((s.url for s in servers), key))
            for server in servers[:2]
        ]
        for proxy in proxies:
            closing.callback(proxy.close)
        yield servers, proxies


def started(work, proxies, processes, *changes):
    address = f"127.0.0.1:{_find_free_port()}"
    urls = ",".join(proxy.url for proxy in proxies)
    overrides = [f"rollout.vllm.url={urls}", f"rollout.vllm.weights_dir={work}-weights", *changes]
    sets = [part for change in [*CHANGES, *overrides] for part in ("--set", change)]
    typed = ["--config", "tiny_vllm.py", "--workdir", str(work), *sets]
    children = []
    for number in range(processes):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(work.parent), str(ROOT)])
        if processes > 1:
            env |= dict(zip(PROCESS_VARIABLES, (address, str(processes), str(number)), strict=True))
        log = open(f"{work}-{number}.txt", "w")
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", REPORTED, f"{work}-{number}.jsonl", *typed],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
            )
        )
        log.close()
    return children


def rows_of(work, number):
    path = Path(f"{work}-{number}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(work):
    rows = read_metrics(work / "metrics.jsonl")
    return {row["step"]: row for row in rows if row["stage"] == "rl" and row["step"]}


def wait(holds, running, work):
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert all(process.poll() is None for process in running), Path(f"{work}-0.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_no_prompt_is_lost_or_doubled_across_restarts(three, tmp_path):
    servers, proxies = three
    (tmp_path / "uneven.py").write_text(REWARD)
    single_dir, work = tmp_path / "alone", tmp_path / "four"
    (process,) = started(single_dir, proxies, 1, "steps=4")
    assert process.wait(WAIT_S) == 0, Path(f"{single_dir}-0.txt").read_text()

    running = started(work, proxies, 4, "mesh.fsdp=2", "mesh.expert=2")
    try:
        wait(lambda: 2 in metrics_of(work), running, work)
        os.killpg(servers[1]._process.pid, signal.SIGKILL)
        wait(lambda: 5 in metrics_of(work), running, work)  # it goes on with the other one
        proxies[1].upstream = servers[2].url
        for number, process in enumerate(running):
            assert process.wait(WAIT_S) == 0, Path(f"{work}-{number}.txt").read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()

    metrics, rows = metrics_of(work), rows_of(work, 0)
    assert sorted(metrics) == list(range(1, STEPS + 1)) and len(rows) == STEPS
    assert all(rows_of(work, number) == rows for number in (1, 2, 3))
    prompts = [[row[0] for row in step] for step in rows]
    assert prompts[:4] == [[row[0] for row in step] for step in rows_of(single_dir, 0)]
    for number, step in enumerate(rows, start=1):
        ids = [row[0] for row in step]
        assert ids == [i for i in ids[::4] for _ in range(4)] and len(set(ids[::4])) == 4
        assert all(set(versions) == {number - 1} for _, _, versions, _ in step)
        assert len({(i, tuple(tokens)) for i, tokens, *_ in step}) > 12  # samples are their own
    assert min(row["grad/norm"] for row in metrics.values()) > 0  # all versions are others
    gap = "train_rollout_logprob_abs_diff"
    gaps = [row[gap] for row in metrics.values()]
    assert np.isfinite([row["loss"] for row in metrics.values()]).all()
    assert max(gaps) < 2 * max(row[gap] for row in metrics_of(single_dir).values()) + 1e-6
    alerts = " ".join(str(row.get("alerts", "")) for row in metrics.values())
    assert "is unavailable" in alerts and "is reconnected, with weights" in alerts
    assert not list(Path(f"{work}-weights").iterdir())
    print(
        f"gap {max(gaps):.2g}, alone {max(row[gap] for row in metrics_of(single_dir).values()):.2g}"
    )
