# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/examples run as they stand, and train."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import load_params
from jaxmoe.config_file import load_config, override
from jaxmoe.records import Sampling
from tests.jaxmoe.vllm.stand_in import Row, StandIn
from tests.jaxmoe.vllm.vllm_cases import CFG, OPS, check_rollouts, prompts, weights

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


@pytest.mark.slow
def test_the_training_loop_of_the_docs_learns():
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        rewards = runpy.run_path(str(EXAMPLES / "train_loop.py"))["main"](steps=12)
    assert len(rewards) == 12
    assert np.mean(rewards[:2]) < 0.7 and np.mean(rewards[-2:]) > 0.9


def test_an_example_is_short_enough_to_read():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path


def test_the_docs_study_compares_two_algorithms(tmp_path, capsys):
    """With a double of a training: twenty of them would take most of an hour."""
    calls = []

    def run(config, contender, rate, seed, *, folder):
        override(load_config(config), *contender.settings)  # refuses what is no setting
        calls.append((contender.name, rate, seed))
        return {"eval/accuracy": 0.5 + 0.1 * seed + (0.2 if rate == 3e-4 else 0.0)}

    runpy.run_path(str(EXAMPLES / "compare_settings.py"))["main"](tmp_path, run)
    assert len(calls) == len(set(calls)) == 20
    assert "RLOO" in capsys.readouterr().out


class ServerOfTheDocs(StandIn):
    """The routes that docs/extending.md invents."""

    def do_info(self, body, query):
        info = {"process": self.instance, "label": self.label or "", "rows": 4}
        return info | {"context": self.context}

    def do_load(self, body, query):
        self.params = load_params(Path(body["folder"]), self.cfg, "float32")
        self.label = body["label"]

    def do_score(self, body, query):
        entries = self.prompt_logprobs(self.params, body["tokens"])[1:]
        logps = [e[str(t)]["logprob"] for e, t in zip(entries, body["tokens"][1:], strict=True)]
        return {"logp": [0.0, *logps], "label": self.label}

    def do_sample(self, body, query):
        rows = [Row(body["seed"] + i, body["tokens"]) for i in range(body["samples"])]
        while not all(row.finish for row in rows):
            self.step(self.params, self.label, rows, body | UNCUT, set(body["stop_ids"]))
        names = ("tokens", "logp", "finish", "labels")
        return [{name: getattr(row, name) for name in names} for row in rows]


UNCUT = {"top_k": 0, "top_p": 1.0}


def test_the_docs_backend_samples_each_version():
    page = (EXAMPLES.parent / "extending.md").read_text()
    block = re.search(r"^```python\n(# my_servers.py\n.*?)^```$", page, re.S | re.M)
    names: dict = {}
    exec(block[1], names)
    server = ServerOfTheDocs(CFG)
    cfg = load_config("tiny.py")
    data, rollout = (
        replace(cfg.data, max_prompt_tokens=20),
        replace(cfg.rollout, max_new_tokens=13),
    )
    cfg = replace(cfg, model=CFG, data=data, rollout=rollout)
    engine = names["describe"](cfg, urls=server.url).open(cfg, OPS, None, None)
    try:
        for version in (1, 2):
            engine.load(weights(version), version)
            out = engine.generate(prompts(4), Sampling(13, ()), seed=3, samples=2)
            check_rollouts(out, prompts(4), 2, version)
        assert not engine.incidents
    finally:
        engine.close()
        server.crash()
