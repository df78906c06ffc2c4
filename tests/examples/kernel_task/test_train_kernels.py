# SPDX-License-Identifier: Apache-2.0
"""The kernel task in the training loop: from its rows to the metrics."""

import json
from dataclasses import replace

import numpy as np
import pytest
from kernel_ranking import KERNELS
from kernel_rows import list_kernel_rows
from scripted import Run, Scripted, lines

from jaxmoe.data.tokenizer import load_tokenizer
from tests.examples.kernel_task.kernel_cheats import CHEATS
from tests.jaxmoe.sandbox.kinds import first_kind

ROWS = (
    "data.task=kernels.jsonl data.options={} data.train_rows=32 data.held_out_rows=2 "
    "data.max_prompt_tokens=512 data.swapped_share=0"
).split()
NAME = "reward/score_kernel"


class Programmer(Scripted):
    """Answers with a kernel of the table and a cheat, in turn."""

    def rollout(self, prompt, seed, i, sampling, first):
        made = super().rollout(prompt, seed, i, sampling, first)
        self.number = getattr(self, "number", 0) + 1
        code = KERNELS["rows in integers"] if self.number % 2 else CHEATS["numpy"].code
        tokens = np.array(load_tokenizer("bytes").encode(code), np.int32)
        assert len(tokens) <= sampling.max_new_tokens
        return replace(
            made,
            tokens=tokens,
            rollout_logp=np.full(len(tokens), -1.0, np.float32),
            weight_versions=np.full(len(tokens), self.version, np.int32),
        )


@pytest.fixture
def rows(tmp_path, monkeypatch):
    text = "".join(json.dumps(row) + "\n" for row in list_kernel_rows())
    (tmp_path / "kernels.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)


def test_a_kernel_is_paid_and_cheats_are_counted(tmp_path, rows):
    first_kind()
    reward = "data.rewards=kernel_scorer:score_kernel(repetitions=1)"
    changes = (*ROWS, reward, "rollout.max_new_tokens=1024", "steps=1", "eval.every_steps=1")
    Run(tmp_path, Programmer(), changes=changes)()
    row = lines(tmp_path)[-1]
    assert row[f"{NAME}/correct/mean"] == row["hack/imports_refused"] == 0.5
    assert row[f"{NAME}/incorrect/mean"] == row[f"{NAME}/no_code/mean"] == 0.0
    assert row[f"{NAME}/speedup/mean"] > 2.0  # of those that are right
    assert row["reward/mean"] == pytest.approx(row[f"{NAME}/mean"])
    assert 0.2 < row["reward/mean"] < 0.5
    assert f"eval/{NAME}/correct/mean" in lines(tmp_path)[0]
