# SPDX-License-Identifier: Apache-2.0
"""The price of an algorithm at equal forwards: its step against plain GRPO's, in turn.

    python tests/bench/step_time.py [--rounds 12]

Both sides score the batch under the old and the reference policy, take one gradient and update.
Plain is GRPO with the k3 penalty; the most expensive configuration adds every correction, a
sequence-level objective, entropy bonus and gate at once. CPU-seconds, the tiny job's
shapes; the last line is JSON.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import init_params, make_ops
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.update import rl_step

EQUAL = ("loss.old_logp=recomputed", "loss.kl_coef=0.01")
MOST_EXPENSIVE = (
    "loss.objective=gspo", "loss.aggregation=kept_token_mean",
    "loss.rollout_correction=rejection(statistic='seq_mean_k3', high=0.5) + veto + "
    "drift_mask(max_drift=1.0) + sequence_is + normalize", "loss.entropy_coef=0.001",
    "loss.advantages=reinforce_pp_baseline_advantages", "gate.ess=0.1",
)  # fmt: skip


def batch_of(cfg) -> Batch:
    dice, shape = np.random.default_rng(0), (cfg.rollout.sequences_per_step, cfg.context)
    mask = np.arange(shape[1])[None] >= cfg.data.max_prompt_tokens
    return Batch(
        tokens_BT=dice.integers(0, cfg.model.vocab_size, shape).astype(np.int32),
        positions_BT=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        segment_ids_BT=np.ones(shape, np.int32),
        loss_mask_BT=np.broadcast_to(mask, shape),
        rollout_logp_BT=np.where(mask, -5.5 + 0.3 * dice.normal(size=shape), 0).astype(np.float32),
        rewards_B=dice.random(shape[0]).astype(np.float32),
        samples_per_prompt=cfg.rollout.samples_per_prompt,
    )  # fmt: skip


class Side:
    """One configuration, compiled and warm."""

    def __init__(self, changes: tuple[str, ...]) -> None:
        cfg = override(load_config("tiny.py"), *EQUAL, *changes)
        tx, scorer = rl_optimizer(cfg), Scorer(cfg.model, make_ops(cfg))
        self.step = jax.jit(
            partial(
                rl_step, tx=tx, algorithm=algorithm_from_config(cfg), scorer=scorer, gate=cfg.gate
            ),
            donate_argnums=0,
        )
        params = init_params(jax.random.key(0), cfg.model)
        frozen = Frozen(jax.tree.map(lambda x: 1.01 * x, params))
        self.state, self.batch = init_state(Trained(params), tx, frozen), batch_of(cfg)
        for _ in range(3):
            self.seconds()

    def seconds(self) -> float:
        start = time.process_time()
        self.state, metrics, _ = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        assert np.isfinite(float(metrics["loss"])) and not float(metrics["gate/closed"])
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    keep_freed_memory()
    plain, costly = Side(()), Side(MOST_EXPENSIVE)
    pairs = [(plain.seconds(), costly.seconds()) for _ in range(args.rounds)]
    a, b = np.array(pairs).T
    result = {
        "plain_cpu_s": float(np.median(a)), "most_expensive_cpu_s": float(np.median(b)),
        "ratio_of_medians": float(np.median(b) / np.median(a)),
        "ratio_of_minima": float(b.min() / a.min()),
        "median_of_ratios": float(np.median(b / a)),
    }  # fmt: skip
    times = f"{result['most_expensive_cpu_s']:.3f} CPU-s, {result['ratio_of_medians']:.3f}x"
    print(f"| plain GRPO | {result['plain_cpu_s']:.3f} CPU-s |")
    print(f"| the most expensive | {times} |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
