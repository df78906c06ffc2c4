# SPDX-License-Identifier: Apache-2.0
"""Plot the comparison of engine and trainer: plots/doctor.png in the run folder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxmoe.observe.plots import BLUE, GREEN, GREY, ORANGE, save_figure
from jaxmoe.run_files import make_folder


def plot_gap(
    path: Path,
    engine_N: np.ndarray,
    trainer_N: np.ndarray,
    title: str,
    layers: Sequence[tuple[float, float]] = (),
) -> None:
    """Plot the log-probs against each other, the distribution of |Δlogp|, and switched experts.

    layers: for each layer, the share of tokens whose experts differ: in the complete model, and
        with the engine's experts in all earlier layers.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    scatter, spread, switches = figure.subplots(1, 3)
    scatter.plot(trainer_N, engine_N, ".", ms=3, alpha=0.5, color=BLUE)
    low = float(min(trainer_N.min(), engine_N.min()))
    scatter.plot([low, 0], [low, 0], color=GREY, lw=1)
    scatter.set(xlabel="trainer, nats", ylabel="engine, nats", title="log-prob of sampled tokens")
    # A gap of exactly 0 has no place on a logarithmic axis.
    gap_N = np.sort(np.maximum(np.abs(trainer_N - engine_N), 1e-9))
    spread.plot(gap_N, 1 - np.arange(len(gap_N)) / len(gap_N), color=ORANGE)
    spread.set(xscale="log", yscale="log", xlabel="|Δlogp|, nats", title="share of tokens above")
    layer_numbers = np.arange(len(layers))
    if layers:
        switches.bar(
            layer_numbers - 0.2, [x[0] for x in layers], 0.4, color=BLUE, label="complete model"
        )
        switches.bar(
            layer_numbers + 0.2, [x[1] for x in layers], 0.4, color=GREEN, label="this layer alone"
        )
        switches.legend(frameon=False)
        switches.xaxis.get_major_locator().set_params(integer=True)
        switches.margins(y=0.25)
    else:
        switches.text(
            0.5,
            0.5,
            "the engine does not report its experts",
            transform=switches.transAxes,
            ha="center",
            color=GREY,
        )
    switches.set(xlabel="layer", title="share of tokens with other experts")
    for axes in (scatter, spread, switches):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    make_folder(path.parent)
    save_figure(figure, path, 100)
