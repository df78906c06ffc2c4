# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.eval --config FILE`: score a run's newest checkpoint on the held-out rows.

Without a checkpoint in the run folder it scores the config's initial weights, with the adapter
`lora.init_from` if there is one.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

import jax

from jaxmoe.checkpoint.base import load_stage_base, own_base_digest
from jaxmoe.checkpoint.run import code_version, initial_params, restore_policy
from jaxmoe.cli import ExitStatus, parse_config
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.scores import response_text
from jaxmoe.collection.source_digests import source_digests
from jaxmoe.collection.tasks import digest_contents, open_task
from jaxmoe.config import Config, to_json
from jaxmoe.config_file import override
from jaxmoe.distributed.processes import check_same_everywhere, exit_process, joined_processes
from jaxmoe.model import make_engine_ops, make_ops
from jaxmoe.observe.progress import report_phase
from jaxmoe.parallel.check_collectives import check_collectives
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.parallel.sampling_copy import move_to_engine
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.state import init_run_adapters
from jaxmoe.rollout.engine import BaseReader, open_engine
from jaxmoe.run.dry_run import dry_run
from jaxmoe.run.engine_weights import make_engine_reader
from jaxmoe.run.kernels import choose_run_kernels
from jaxmoe.run.memory import check_memory


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        cfg, is_dry_run = parse_config(argv, "Score a checkpoint on the held-out rows.")
        if is_dry_run:
            dry_run(cfg, "evaluating")
            return status.code
        with joined_processes():
            run_eval(cfg)
    return exit_process(status.code)


def run_eval(cfg: Config) -> float:
    """Print and return accuracy (or the mean of the user's rewards), and print some answers."""
    sources = json.dumps(source_digests(cfg), indent=1)
    check_same_everywhere(config=to_json(cfg), code=code_version(), sources=sources)
    # Before this process opens the device, because a TPU admits one process and the check is
    # another.
    kernels = choose_run_kernels(cfg)
    ops = make_engine_ops(cfg, kernels.impls) or make_ops(cfg, kernels.impls)
    check_mesh(cfg, jax.device_count())
    samples = max(8, cfg.eval.samples_per_prompt)
    check_memory(override(cfg, f"eval.samples_per_prompt={samples}"), "evaluating")
    kernels.print_decision()
    task, mesh = open_task(cfg), make_mesh(cfg.mesh)
    check_collectives(mesh)
    contents = digest_contents(cfg, task) | own_base_digest(cfg)
    saved = restore_policy(Path(cfg.workdir), cfg, mesh, contents=contents)
    base = load_stage_base(cfg, saved and saved.stage)
    if saved is not None:
        params = saved.params
    else:
        params = initial_params(cfg, mesh) if base is None else init_run_adapters(cfg, base)
    prompts = task.held_out_prompts()
    with closing(open_engine(cfg, ops, Path(cfg.workdir), mesh)) as engine:
        # Versions of weights count the steps of RL, and not those of the warm start.
        version = 0 if saved is None else saved.rl_step
        weights = make_engine_reader(cfg, mesh)(base, params)
        if isinstance(engine, BaseReader):
            if weights is params:
                # Nothing else needs the weights, so they become the engine's without a second copy.
                base = weights = params = move_to_engine(params, cfg.model, mesh)
            if base is not None:
                engine.share_base(base)
        engine.load(weights, version)
        with report_phase(f"answering {len(prompts)} held-out prompts"):
            metrics, rollouts, rewards = evaluate_held_out(
                engine, prompts, task, version=version, samples=samples
            )
    for rollout, reward in list(zip(rollouts, rewards, strict=True))[:5]:
        mark = f"{reward:.3g}" if task.rewards else "right" if reward == 1 else "wrong"
        print(f"  {mark}  {rollout.prompt.text!r} -> {response_text(rollout, task)!r}")
    initial = f"the adapter {cfg.lora.init_from}" if cfg.lora.init_from else "the initial weights"
    source = initial if saved is None else f"{saved.stage} step {saved.step}"
    print(
        f"{task.score_name} {metrics['eval/accuracy']:.4f} sampled at temperature "
        f"{task.sampling.temperature:g} ({samples} answers per prompt), "
        f"{metrics['eval/accuracy_greedy']:.4f} greedy, on {len(prompts)} held-out rows ({source})"
    )
    for name in sorted(metrics.keys() - {"eval/accuracy", "eval/accuracy_greedy"}):
        print(f"{name.removeprefix('eval/')} {metrics[name]:.4f}")
    return metrics["eval/accuracy"]


if __name__ == "__main__":
    sys.exit(main())
