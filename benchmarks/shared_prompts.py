# SPDX-License-Identifier: Apache-2.0
"""What shared prompts save of a step of RL: CPU-seconds, temporary bytes and computed tokens.

    python benchmarks/shared_prompts.py [--rounds 5] [--config tiny.py] [--set key=value ...]

Steps with own prompts and with shared ones, in turn, on a batch of full lengths. Other lengths:
--set data.max_prompt_tokens=512 --set rollout.max_new_tokens=64 --set rollout.samples_per_prompt=8
--set rollout.sequences_per_step=16. Rows without groups: --set rollout.samples_per_prompt=1
--set loss.advantages=reinforce_pp_advantages. It shares every batch; with
--set optim.share_prompts=auto it shares what a run shares, and same_program says whether both steps
are one program with equal inputs, whose times differ by chance. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.in_turn import draw_groups, measure_in_turn, print_times, take_medians
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.model import init_params, make_ops
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import sharing_metrics, split_minibatches
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import jit_step


def compile_step(cfg: Config, shares: bool) -> tuple[Callable[[], Any], dict[str, float], Any]:
    """A step that trains further at each call, what it needs, and its program and inputs."""
    ops, tx, algorithm = make_ops(cfg), rl_optimizer(cfg), algorithm_from_config(cfg)
    scorer = Scorer(cfg.model, ops, cfg.rollout.temperature, cfg.critic.backbone)
    sharing = sharing_from_config(cfg, ops.attend) if shares else None
    batch, minibatches = split_minibatches(
        draw_groups(cfg),
        algorithm,
        seed=(0,),
        sharing=sharing,
        tokens_per_microbatch=cfg.optim.tokens_per_microbatch,
    )
    step = jit_step(
        tx=tx,
        algorithm=algorithm,
        scorer=scorer,
        microbatches=cfg.optim.microbatches,
        donate_argnums=0,
    )
    state = init_state(Trained(init_params(jax.random.key(0), cfg.model)), tx)
    lowered = step.lower(state, batch, minibatches)
    compiled = lowered.compile()
    inputs = [np.asarray(x).tobytes() for x in jax.tree.leaves((batch, minibatches))]
    batch, minibatches = jax.device_put((batch, minibatches))

    def run() -> float:
        nonlocal state
        state, metrics, _ = compiled(state, batch, minibatches)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    loss = run()
    memory = compiled.memory_analysis()
    assert memory is not None
    frac = sharing_metrics(batch, minibatches)["batch/computed_tokens_frac"]
    needs = {"loss": loss, "temporary": memory.temp_size_in_bytes, "tokens": frac}
    return run, needs, (lowered.as_text(), inputs)


def main() -> None:
    """Print the medians of both sides, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="tiny.py")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cfg = override(load_config(args.config), "optim.share_prompts=on", *args.set)
    made = {name: compile_step(cfg, name == "shared") for name in ("own", "shared")}
    medians = take_medians(
        measure_in_turn({name: run for name, (run, *_) in made.items()}, args.rounds)
    )
    print_times("step", medians)
    own, shared = (made[name][1] for name in ("own", "shared"))
    print(
        json.dumps(
            {
                "cpu": round(float(medians["shared"][0] / medians["own"][0]), 3),
                "seconds": round(float(medians["shared"][1] / medians["own"][1]), 3),
                "temporary": round(shared["temporary"] / own["temporary"], 3),
                "tokens": round(shared["tokens"], 3),
                "loss": [own["loss"], shared["loss"]],
                "same_program": made["own"][2] == made["shared"][2],
            }
        )
    )


if __name__ == "__main__":
    main()
