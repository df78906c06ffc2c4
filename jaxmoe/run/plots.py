# SPDX-License-Identifier: Apache-2.0
"""The plots of a run, drawn from the files that it has written so far.

Next: jaxmoe/run/job.py draws them after each evaluation.
"""

import sys
from pathlib import Path

import jax

from jaxmoe.config import Config
from jaxmoe.observe.metrics import read_metrics, read_samples
from jaxmoe.observe.router_plot import plot_router
from jaxmoe.run.parts import Parts
from jaxmoe.run_files import RunFolderError


def draw_plots(cfg: Config, parts: Parts, step: int) -> None:
    """Plot the run up to a step of RL; after the last one also one file per panel."""
    # Only the first process has the metrics.
    if jax.process_index():
        return
    work, task = Path(cfg.workdir), parts.task
    rows = read_metrics(work / "metrics.jsonl")
    try:
        parts.plot_run(rows, work, panels=step == cfg.steps, score=task.score_name)
        if cfg.router.instruments:
            plot_router(read_samples(work / "layers.jsonl"), work)
    # Plots can be drawn again from metrics.jsonl, so a run does not end for them.
    except RunFolderError as error:
        print(f"! no plots: {error}", file=sys.stderr, flush=True)
