# SPDX-License-Identifier: Apache-2.0
"""Four trainer processes and two vLLM servers, one of which is killed and comes back."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from proxy import Proxy
from vllm_cases import PYTHON

from jaxmoe.config import VllmConfig
from jaxmoe.config_file import load, override
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.parallel.processes import PLAIN
from jaxmoe.vllm.server import Server, _free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]
ROOT = Path(__file__).parents[3]
STEPS = 40
CHANGES = [
    "model.d_model=64", "model.d_expert=32", "data.train_rows=64", "data.held_out_rows=6",
    "warmup.steps=3", "warmup.sequences_per_step=16", "rollout.sequences_per_step=16",
    "rollout.samples_per_prompt=4", "rollout.max_gen_batches=1", f"steps={STEPS}",
    "eval.every_steps=20", "save.every_steps=20", "rollout.vllm.request_timeout_s=60",
]  # fmt: skip
# the train command, which also writes what each step trains on
TOLD = """
import json, sys
import jaxmoe.train as train
make_batch = train.make_batch
def told(cfg, task, rollouts, rewards):
    rows = [[r.prompt.id, r.tokens.tolist(), r.weight_versions.tolist()] for r in rollouts]
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(rows) + "\\n")
    return make_batch(cfg, task, rollouts, rewards)
train.make_batch = told
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two servers of one key, each behind an address that stays."""
    work, key = tmp_path_factory.mktemp("servers"), secrets.token_urlsafe(16)
    cfg = override(load("tiny_vllm.py"), *CHANGES)
    with ExitStack() as closing:
        made = []
        for number in range(2):
            server = Server(
                VllmConfig(python=PYTHON), cfg.model, work=work, number=number,
                context=cfg.context, rows=cfg.rollout.max_parallel_sequences,
            )  # fmt: skip
            server.key = key
            closing.callback(server.stop)
            server.start().close()
            proxy = Proxy(server.url, {server.url: key})
            closing.callback(proxy.close)
            made.append((server, proxy))
        yield made


def started(work, two, processes, *changes):
    address = f"127.0.0.1:{_free_port()}"
    urls = ",".join(proxy.url for _, proxy in two)
    more = [f"rollout.vllm.url={urls}", f"rollout.vllm.weights_dir={work}-weights", *changes]
    sets = [part for change in [*CHANGES, *more] for part in ("--set", change)]
    typed = ["--config", "tiny_vllm.py", "--workdir", str(work), *sets]
    for number in range(processes):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        if processes > 1:
            env |= dict(zip(PLAIN, (address, str(processes), str(number)), strict=True))
        log = open(f"{work}-{number}.txt", "w")
        yield subprocess.Popen(
            [sys.executable, "-c", TOLD, f"{work}-{number}.jsonl", *typed],
            cwd=ROOT, env=env, stdout=log, stderr=log,
        )  # fmt: skip


def rows_of(work, number):
    path = Path(f"{work}-{number}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(work):
    rows = read_metrics(work / "metrics.jsonl")
    return {row["step"]: row for row in rows if row["stage"] == "rl" and row["step"]}


def wait(holds, running, work):
    until = time.monotonic() + 300
    while not holds():
        assert all(process.poll() is None for process in running), Path(f"{work}-0.txt").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)


def test_no_prompt_is_lost_or_doubled_when_a_server_is_killed_and_comes_back(two, tmp_path):
    alone, work = tmp_path / "alone", tmp_path / "four"
    for process in started(alone, two, 1, "steps=4", "eval.every_steps=4", "save.every_steps=4"):
        assert process.wait(300) == 0, Path(f"{alone}-0.txt").read_text()

    running = list(started(work, two, 4, "mesh.fsdp=2", "mesh.expert=2"))
    wait(lambda: 3 in metrics_of(work), running, work)
    server, proxy = two[1]
    os.killpg(server._process.pid, signal.SIGKILL)
    wait(lambda: len(metrics_of(work)) >= 8, running, work)  # it goes on with the other one
    server.start().close()
    proxy.keys[server.url] = server.key
    proxy.upstream = server.url
    for number, process in enumerate(running):
        assert process.wait(300) == 0, Path(f"{work}-{number}.txt").read_text()

    metrics, rows = metrics_of(work), rows_of(work, 0)
    assert sorted(metrics) == list(range(1, STEPS + 1)) and len(rows) == STEPS
    assert all(rows_of(work, number) == rows for number in (1, 2, 3))
    prompts = [[row[0] for row in step] for step in rows]
    assert prompts[:4] == [[row[0] for row in step] for step in rows_of(alone, 0)]
    for number, step in enumerate(rows, start=1):
        ids = [row[0] for row in step]
        assert ids == [i for i in ids[::4] for _ in range(4)] and len(set(ids[::4])) == 4
        assert all(set(versions) == {number - 1} for _, _, versions in step)
        assert len({(i, tuple(tokens)) for i, tokens, _ in step}) > 12  # samples are their own
    gap = "train_rollout_logprob_abs_diff"
    gaps = [row[gap] for row in metrics.values()]
    assert np.isfinite([row["loss"] for row in metrics.values()]).all()
    assert max(gaps) < 2 * max(row[gap] for row in metrics_of(alone).values()) + 1e-6
    told = " ".join(str(row.get("alerts", "")) for row in metrics.values())
    assert "is away" in told and "is back, with weights" in told
    assert not list(Path(f"{work}-weights").iterdir())
    print(f"gap {max(gaps):.2g}, alone {max(row[gap] for row in metrics_of(alone).values()):.2g}")
