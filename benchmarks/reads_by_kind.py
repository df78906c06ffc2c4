# SPDX-License-Identifier: Apache-2.0
"""How far log-probs go where one kind of tensor alone is rounded to bfloat16 on one of two sides.

    python benchmarks/reads_by_kind.py [--steps 30]

Of a bfloat16 model whose masters are float32, trained on the bed of compare_numerics.py. With
invariant numerics an engine draws answers and the trainer reads them: nothing rounded they are
equal to the bit, so that a difference is that kind's and no order's. No seeds are needed for it.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare_numerics import FAST, Bench, Line
from benchmarks.compare_reads import KINDS, RATE, rounded_ops
from benchmarks.runs import new_engine
from jaxmoe.batches.batch import rollout_batch
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import make_ops
from jaxmoe.rl.metrics.router_metrics import expert_switches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained

SAMPLES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=60, help="supervised steps of the start")
    args = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.steps, args.warmup)
        bench.run(Line(FAST), 0, RATE, 0)
        print("| rounded | mean gap | largest gap | k3 | tokens and layers with other experts |")
        print("|---" * 5 + "|", flush=True)
        for name, found in by_kind(bench).items():
            print(f"| {name} | {' | '.join(f'{x:.2g}' for x in found)} |", flush=True)


def by_kind(bench: Bench) -> dict[str, tuple[float, ...]]:
    """Mean and largest gap, k3, and the share of other experts, by what is rounded."""
    cfg = bench.config(("model.numerics=invariant", "rollout.compare_experts=True"), 0)
    engine, prompts = new_engine(cfg), bench.task.held_out_prompts()
    engine.load(bench.trained, 0)
    rollouts = engine.generate(prompts, bench.task.sampling, seed=1, samples=SAMPLES)
    batch = rollout_batch(
        rollouts,
        np.zeros(len(rollouts), np.float32),
        samples=SAMPLES,
        length=cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens,
        pad_id=0,
        n_experts=cfg.model.n_experts,
    )
    batch = jax.tree.map(jnp.asarray, batch)
    ops = make_ops(cfg)

    def gaps(kinds: tuple[str, ...]) -> tuple[float, ...]:
        scorer = Scorer(cfg.model, rounded_ops(ops, kinds))
        read: Any = jax.jit(scorer.score_policy)(Trained(bench.trained), batch)
        drawn = np.asarray(batch.loss_mask_BT)
        d = (np.asarray(read["logp_BT"]) - np.asarray(batch.rollout_logp_BT))[drawn].astype(float)
        other = expert_switches(read["experts_BTLA"], batch)["router/expert_switches"]
        return tuple(
            float(x) for x in (abs(d).mean(), abs(d).max(), np.mean(np.expm1(d) - d), other)
        )

    rows = {"nothing": ()} | {kind: (kind,) for kind in KINDS} | {"all of them": tuple(KINDS)}
    return {name: gaps(kinds) for name, kinds in rows.items()}


if __name__ == "__main__":
    main()
