# SPDX-License-Identifier: Apache-2.0
"""A teacher in two processes: the steps and the parameters of one process over the same mesh."""

import numpy as np
import pytest
from process_environ import run_together
from safetensors.numpy import load_file

from jaxmoe import export
from tests.jaxmoe.commands import TINIEST, arguments, lines
from tests.jaxmoe.teacher_folder import write_teacher

SETTINGS = (
    *TINIEST,
    "mesh.fsdp=2",
    "distill.advantage_coef=0.5",
    "distill.reverse_kl_coef=0.3",
    "distill.forward_kl_coef=0.2",
    "distill.reward_coef=0.5",
    "optim.lr=0.01",
    "optim.lr_warmup_steps=0",
    "save.export_dtype=float32",
)
RTOL = 1e-6  # as supervised steps of two processes: gloo sums in another order


def run_steps(work, processes, teacher):
    """The lines of RL, and the exported parameters, of a run over two devices."""
    words = arguments(work, *SETTINGS, f"distill.teacher={teacher}")
    for _ in range(3):
        ends = run_together(["-m", "jaxmoe.train", *words], processes, 2 // processes, 1200)
        # gloo waits 30 s for the first collective, which is too short on a busy machine
        if not any("Gloo context initialization failed" in text for *_, text in ends):
            break
    assert all(code == 0 for code, *_ in ends), ends
    assert export.main([*words, "--out", str(work / "export")]) == 0
    rows = [row for row in lines(work) if row["stage"] == "rl" and "loss" in row]
    return rows, load_file(work / "export" / "model.safetensors")


@pytest.mark.slow  # two processes and one
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", ["folder", "base"])
def test_two_processes_distill_as_one(kind, tmp_path):
    teacher = write_teacher(tmp_path / "teacher") if kind == "folder" else kind
    (want, expected), (rows, actual) = (
        run_steps(tmp_path / str(count), count, teacher) for count in (1, 2)
    )
    assert len(rows) == len(want) == 3
    worst = 0.0
    for a, b in zip(rows, want, strict=True):
        assert a.keys() == b.keys() and b["grad/norm"] > 0
        for name, value in b.items():
            if isinstance(value, float):
                worst = max(worst, abs(a[name] - value) / max(1.0, abs(value)))
    assert rows[-1]["distill/reverse_kl"] > 1e-4 and rows[-1]["distill/forward_kl"] > 1e-4
    assert actual.keys() == expected.keys()
    weights = max(np.abs(actual[name] - x).max() for name, x in expected.items())
    print(f"{kind}: metrics off by {worst:.1e}, parameters by {weights:.1e}")
    assert worst <= RTOL and weights <= RTOL
