# SPDX-License-Identifier: Apache-2.0
"""The price of an algorithm at equal forwards: its step against plain GRPO's, in turn.

    python benchmarks/step_time.py [--rounds 12]

Both sides score the batch under the old and the reference policy, take one gradient and update.
Plain is GRPO with the k3 penalty; the most expensive configuration adds every correction, a
sequence-level objective, entropy bonus and gate at once. CPU-seconds and seconds, ratios of
CPU-seconds, the tiny job's shapes; the last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.in_turn import make_step, measure_in_turn, take_medians
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import init_params, make_ops
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen

EQUAL = ("loss.old_logp=recomputed", "loss.kl_coef=0.01")
MOST_EXPENSIVE = (
    "loss.objective=gspo",
    "loss.aggregation=kept_token_mean",
    "loss.rollout_correction=rejection(statistic='seq_mean_k3', high=0.5) + veto + "
    "drift_mask(max_drift=1.0) + sequence_is + normalize",
    "loss.entropy_coef=0.001",
    "loss.advantages=reinforce_pp_baseline_advantages",
    "gate.ess=0.1",
)


def make_side(*changes: str) -> Callable[[], None]:
    """A step of one configuration."""
    cfg = override(load_config("tiny.py"), *EQUAL, *changes)
    params = init_params(jax.random.key(0), cfg.model)
    frozen = Frozen(jax.tree.map(lambda x: 1.01 * x, params))
    step = make_step(cfg, params, Scorer(cfg.model, make_ops(cfg)), frozen=frozen)

    def run() -> None:
        metrics = step()
        assert np.isfinite(float(metrics["loss"])) and not float(metrics["gate/closed"])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    keep_freed_memory()
    sides = {"plain": make_side(), "costly": make_side(*MOST_EXPENSIVE)}
    times = measure_in_turn(sides, args.rounds)
    (plain_cpu, plain_s), (costly_cpu, costly_s) = take_medians(times).values()
    a, b = (times[side][:, 0] for side in sides)  # CPU-seconds of the rounds
    result = {
        "plain_cpu_s": plain_cpu,
        "most_expensive_cpu_s": costly_cpu,
        "plain_s": plain_s,
        "most_expensive_s": costly_s,
        "ratio_of_medians": costly_cpu / plain_cpu,
        "ratio_of_minima": float(b.min() / a.min()),
        "median_of_ratios": float(np.median(b / a)),
    }
    ratio = result["ratio_of_medians"]
    print(f"| plain GRPO | {plain_cpu:.3f} CPU-s | {plain_s:.3f} s |")
    print(f"| the most expensive | {costly_cpu:.3f} CPU-s, {ratio:.3f}x | {costly_s:.3f} s |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
