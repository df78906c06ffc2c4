# SPDX-License-Identifier: Apache-2.0
"""Plot the metrics of the router by layer: plots/router.png, a heat map layer × step for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxmoe.observe.plots import GREY, save_figure
from jaxmoe.run_files import make_folder

TITLES = {
    "trainer_load_violation": "busiest expert over the mean, − 1",
    "trainer_unused_experts": "share of unused experts",
    "entropy": "entropy over all experts, nats",
    "top_k_mass": "probability of the top-k",
    "margin_p50": "margin, median, logits",
    "margin_p05": "margin, 5 % quantile, logits",
    "boundary_mass": "share with margin below 0.1",
    "expert_switches": "switches: trainer and engine",
    "old_switches": "switches: before and after updates",
}
_MAX_LAYERS = 4096  # a longer list is not of a model


def plot_router(rows: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Draw one panel for each metric of `rows`, the lines of layers.jsonl; others stay empty."""
    folder = make_folder(directory / "plots")
    figure = Figure(figsize=(13, 8.5))
    figure.subplots_adjust(0.05, 0.06, 0.96, 0.95, wspace=0.32, hspace=0.38)
    for (name, title), axes in zip(TITLES.items(), figure.subplots(3, 3).flat, strict=True):
        steps, values_SL = read_layers(rows, name)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="RL step", ylabel="layer")
        if not len(steps):
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
            continue
        # Cells end halfway between neighbours, since a resumed run may have logged a step less.
        edges = np.concatenate([[steps[0] - 0.5], (steps[1:] + steps[:-1]) / 2, [steps[-1] + 0.5]])
        layers = np.arange(values_SL.shape[1] + 1) - 0.5
        mesh = axes.pcolormesh(edges, layers, values_SL.T, cmap="viridis")
        figure.colorbar(mesh, ax=axes, fraction=0.05, pad=0.02)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, folder / "router.png", 85)


def read_layers(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps [S], values [S, L]) of a metric; lines without it or of another length than the
    last are left out. The file is untrusted."""
    by_step = {
        row["step"]: row[name] for row in rows if row["stage"] == "rl" and _is_layers(row.get(name))
    }
    if not by_step:
        return np.array([]), np.zeros((0, 0))
    length = len(by_step[max(by_step)])
    steps = sorted(step for step, values in by_step.items() if len(values) == length)
    return np.array(steps, float), np.array([by_step[step] for step in steps], float)


def _is_layers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and 0 < len(values) <= _MAX_LAYERS
        and all(type(x) in (int, float) and abs(x) < 1e30 for x in values)
    )
