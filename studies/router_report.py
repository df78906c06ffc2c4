# SPDX-License-Identifier: Apache-2.0
"""Markdown tables and a figure of the exact study of routers.

Next: studies/__main__.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxmoe.observe.plots import save_figure
from studies.estimators import compare_bias, pool_models

COMMAND = "python -m studies router_exact"
Results = Sequence[Mapping[str, Any]]  # of RouterStudy.measure_model, one for each model


@dataclass(frozen=True)
class TableSpec:
    """One table: measurements whose keys begin with `prefix`, by noise or step."""

    prefix: str
    title: str
    axis: str
    statistics: Mapping[str, str]  # name of a statistic -> label of its row
    baseline: str  # the estimator with which the others are compared
    engine: bool = False  # True for a bias to the engine's gradient in each cell


GAP = {
    "switched": "expert sets that differ, of (token, layer)",
    "switched_answers": "answers with a switch",
    "gap": "mean abs Δlogp, nats",
}
ENGINE_GAP = GAP | {"gap_replayed": "… under R3", "gap_soft": "… under soft routing"}
ANNEALED_GAP = {"gap_annealed": "… under annealed routing, halfway"}
UPDATE_GAP = GAP | {
    "value_change": "change of the expected reward J",
    "surrogate_error_current": "error of the surrogate's value",
    "surrogate_error_replayed": "error of the surrogate's value under R2",
}
SOFT_GAP = {
    "value_change_soft": "change of J under soft routing",
    "surrogate_error_soft": "error of the surrogate's value under soft routing",
    "value_change_annealed": "change of J under annealed routing, halfway",
    "surrogate_error_annealed": "error of the surrogate's value under annealed routing, halfway",
}
TABLES = (
    TableSpec(
        "selection",
        "An engine with noise on its router's logits, in selection alone",
        "noise",
        ENGINE_GAP,
        "no correction",
        engine=True,
    ),
    TableSpec(
        "weights",
        "An engine with noise on its router's weights",
        "noise",
        ENGINE_GAP | ANNEALED_GAP,
        "no correction",
        engine=True,
    ),
    TableSpec(
        "forward",
        "On-policy samples, old log-probs from another, noisy forward",
        "noise",
        GAP,
        "ppo_clip",
    ),
    TableSpec(
        "update",
        "Several updates on one batch, the router trained",
        "step",
        UPDATE_GAP | SOFT_GAP,
        "ppo_clip",
    ),
    TableSpec(
        "frozen", "Several updates on one batch, the router frozen", "step", UPDATE_GAP, "ppo_clip"
    ),
)


def format_tables(results: Results) -> str:
    """Return all tables in Markdown."""
    return "\n".join(_format_table(spec, results) for spec in TABLES)


def _format_table(spec: TableSpec, results: Results) -> str:
    keys = _find_keys(spec, results)
    heads = [f"{spec.axis} {key.partition(' ')[2]}" for key in keys]
    lines = [
        f"### {spec.title}",
        "",
        f"`{COMMAND}`, {len(results)} models.",
        "",
        f"| | {' | '.join(heads)} |",
        "|---" * (len(keys) + 1) + "|",
    ]
    for name, label in spec.statistics.items():
        means = [np.mean([model[key]["statistics"][name] for model in results]) for key in keys]
        lines.append(f"| *{label}* | " + " | ".join(f"{x:.2g}" for x in means) + " |")
    for estimator in results[0][keys[0]]["estimators"]:
        cells = []
        for key in keys:
            sums = [model[key]["estimators"][estimator] for model in results]
            figures = pool_models(sums, "trainer")
            error = "" if np.isnan(figures.bias_error) else f" ± {figures.bias_error:.2f}"
            baseline = [model[key]["estimators"][spec.baseline] for model in results]
            compared = compare_bias(sums, baseline, "trainer")
            arrow = "" if abs(compared) < 2 else " ↓" if compared < 0 else " ↑"
            cell = (
                f"{figures.bias:.2f}{error}{arrow}, {figures.deviation:.1f}, {figures.cosine:.2f}"
            )
            if spec.engine:
                cell += f"; {pool_models(sums, 'engine').bias:.2f}"
            cells.append(cell)
        lines.append(f"| {estimator} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def plot_tables(results: Results, path: Path) -> None:
    """Draw the bias of each estimator as a heat map for each table and target."""
    panels = [(spec, "trainer") for spec in TABLES]
    panels += [(spec, "engine") for spec in TABLES if spec.engine]
    n_columns = -(-len(panels) // 2)
    figure = Figure(figsize=(4.2 * n_columns, 11), layout="constrained")
    places = list(figure.subplots(2, n_columns).flat)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    for axes, (spec, target) in zip(places, panels, strict=False):
        keys = _find_keys(spec, results)
        names = list(results[0][keys[0]]["estimators"])
        biases = np.array(
            [
                [
                    pool_models([m[k]["estimators"][name] for m in results], target).bias
                    for k in keys
                ]
                for name in names
            ]
        )
        # The colours end where an estimate is no better than 0, whose bias is 1.
        image = axes.imshow(biases, vmin=0.0, vmax=1.0, cmap="cividis", aspect="auto")
        axes.set_xticks(range(len(keys)), [key.partition(" ")[2] for key in keys])
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel(spec.axis)
        axes.set_title(f"{spec.title}:\nbias to the {target}'s gradient", fontsize=7)
    figure.colorbar(image, ax=places, shrink=0.4, label="bias; 1 and above are one colour")
    save_figure(figure, path, 72)


def _find_keys(spec: TableSpec, results: Results) -> list[str]:
    """Keys of a table, by noise or step."""
    keys = [key for key in results[0] if key.partition(" ")[0] == spec.prefix]
    return sorted(keys, key=lambda key: float(key.partition(" ")[2]))
