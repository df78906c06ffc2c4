# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of the four-bit study. Next: studies/__main__.py."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxmoe.study.contenders import Comparison, format_rate
from studies.trained_report import format_difference

COLUMNS = {
    "end": "{:.3f}",
    "end_unrounded": "{:.3f}",
    "k3": "{:.2g}",
    "ess": "{:.3f}",
    "grad_norm_median": "{:.2g}",
    "grad_norm_p99": "{:.2g}",
    "ratio_max": "{:.3g}",
    "moved_per_step": "{:.4f}",
    "moved": "{:.3f}",
}


def format_mxfp4_tables(results: Mapping[str, Sequence[Comparison]]) -> str:
    """Return one table of each bed: the difference to the first contender, and what happened.

    Columns as `train_on_mxfp4_bed`: means over the seeds, of ratio_max the largest.
    """
    parts = [
        f"### {bed}\n\n`python -m studies mxfp4 --beds {bed}`. {_format_bed(comparisons)}"
        for bed, comparisons in results.items()
    ]
    return "\n\n".join(parts) + "\n"


def _format_bed(comparisons: Sequence[Comparison]) -> str:
    start = np.mean([m["start"] for m in comparisons[0].metrics])
    lines = [
        f"The start has {start:.3f}.",
        "",
        "| contender | rate | difference, 95 % | " + " | ".join(COLUMNS) + " | by seed |",
        "|---|" + "---|" * (len(COLUMNS) + 3),
    ]
    for c in comparisons:
        cells = []
        for name, form in COLUMNS.items():
            reduce = max if name == "ratio_max" else np.mean
            cells.append(form.format(reduce([m[name] for m in c.metrics])))
        difference = format_difference(c) if c.difference is not None else ""
        by_seed = " ".join(f"{value:.2f}" for value in c.values)
        lines.append(
            f"| {c.contender.name} | {format_rate(c)} | {difference} | {' | '.join(cells)} | "
            f"{by_seed} |"
        )
    return "\n".join(lines)
