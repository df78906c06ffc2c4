# SPDX-License-Identifier: Apache-2.0
"""Which objective and which correction learn, from one warm start, with one budget, over seeds.

    python benchmarks/compare_objectives.py [--seeds 3] [--steps 50] [--only REGEX] [--json FILE]

Every line is the tiny job with `--set` changes; the noisy ones sample from an engine that is made
wrong on purpose: bfloat16 weights and arithmetic, weights that are k steps old, or routers with
noise added. Held-out accuracy is always measured by an engine that is right. Prints a table as
each line is done; FILE keeps the runs, and a second call goes on from it.
"""

import argparse
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.runs import copied, new_engine, quiet_job, warm_policy
from jaxmoe import train
from jaxmoe.checkpoint.run import Position
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.tasks import Task, open_task
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import init_rl_state
from jaxmoe.run.programs import rl_program
from jaxmoe.study import ResultsStore

BUDGET = (
    "data.options.min_word_len=3",
    "data.options.max_word_len=3",
    "loss.entropy_coef=0.08",
    "optim.lr=3e-4",
    "warmup.steps=70",
    "rollout.sequences_per_step=128",
    "rollout.max_gen_batches=1",
    "eval.every_steps=1000000",
    "save.every_steps=1000000",
)
OFF = ("loss.old_logp=recomputed", "loss.minibatches=4")
COLUMNS = ("accuracy", "reward_std", "grad_max", "clip", "gap", "ratio")
STALE, ROUTER_NOISE, FORWARD_NOISE = 4, 0.3, 0.3  # steps; deviations of the router's weights


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    name: str
    changes: tuple[str, ...] = ()
    noise: str = ""  # of the engine: "bf16", "stale" or "router"; "forward": of the old log-probs


CORRECTIONS = {
    "none": (),
    "token IS": ("loss.rollout_correction=token_is",),
    "sequence IS": ("loss.rollout_correction=sequence_is",),
    "IcePop": ("loss.rollout_correction=token_icepop",),
}
START = "the warm start, no step"
LINES = (
    Line(START),
    Line("GRPO, on-policy"),
    Line("RLOO", ("loss.advantages=rloo_advantages",)),
    Line(
        "Dr. GRPO",
        (
            "loss.advantages=group_advantages(scale_by_std=False)",
            "loss.aggregation=seq_mean_token_sum_norm(length=6)",
        ),
    ),
    Line("REINFORCE++", ("loss.advantages=reinforce_pp_advantages",)),
    Line("REINFORCE++, baseline", ("loss.advantages=reinforce_pp_baseline_advantages",)),
    Line(
        "PPO, own critic",
        ("loss.advantages=gae(trace=0.95)", "critic.backbone=own", "critic.lr=1e-3"),
    ),
    Line("GRPO, 4 minibatches", OFF),
    Line("DAPO clip-higher, 4 minibatches", (*OFF, "loss.objective=ppo_clip(clip_high=0.28)")),
    Line(
        "GSPO, 4 minibatches", (*OFF, "loss.objective=gspo", "loss.aggregation=seq_mean_token_mean")
    ),
    Line("CISPO, 4 minibatches", (*OFF, "loss.objective=cispo")),
    Line("SAPO, 4 minibatches", (*OFF, "loss.objective=sapo")),
    Line("DPPO-TV, 4 minibatches", (*OFF, "loss.objective=dppo_tv")),
    Line("two forwards route differently, recomputed", ("loss.old_logp=recomputed",), "forward"),
    *(
        Line(f"{noise} engine, {name}", changes, noise)
        for noise in ("bf16", "stale", "router")
        for name, changes in CORRECTIONS.items()
    ),
)


class NoisyEngine:
    """A native engine that is wrong in one way."""

    def __init__(self, cfg: Config, noise: str) -> None:
        model = replace(cfg.model, dtype="bfloat16") if noise == "bf16" else cfg.model
        self._engine, self._noise = new_engine(replace(cfg, model=model)), noise
        self._held: deque[Any] = deque(maxlen=STALE + 1)

    def restart(self) -> None:
        self._held.clear()

    def load(self, params: Any, version: int) -> None:
        if self._noise == "stale":
            self._held.append(copied(params))
            params = self._held[0]
        if self._noise == "router":
            params = with_router_noise(params, ROUTER_NOISE, version)
        self._engine.load(params, version)

    def generate(self, *args: Any, **named: Any) -> Any:
        return self._engine.generate(*args, **named)


def with_router_noise(params: Any, size: float, seed: int) -> Any:
    """Each router's weights plus normal noise of `size` times their own deviation."""

    def noisy(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "w_router" not in name:
            return x
        key = jax.random.fold_in(jax.random.key(seed), len(name))
        return x + size * jnp.std(x) * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(noisy, params)


@dataclass(frozen=True)
class TwoFaced(Scorer):
    """Its first forward in a step, the one that is not differentiated, routes by noisy routers."""

    calls: list[int] = field(default_factory=list, hash=False, compare=False)

    def score_policy(self, params: Any, batch: Any) -> dict[str, jax.Array]:
        self.calls.append(1)
        if len(self.calls) == 1:
            params = with_router_noise(params, FORWARD_NOISE, 0)
        return super().score_policy(params, batch)


@dataclass
class Bench:
    """What the lines share: the warm starts, the engines."""

    steps: int
    warm: dict[int, Any] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)

    def config(self, line: Line, seed: int) -> Config:
        return override(
            load_config("tiny.py"), *BUDGET, f"steps={self.steps}", f"seed={seed}", *line.changes
        )

    def engine(self, cfg: Config, noise: str) -> Any:
        if noise not in self.engines:
            wrong = noise in ("bf16", "stale", "router")
            self.engines[noise] = NoisyEngine(cfg, noise) if wrong else new_engine(cfg)
        return self.engines[noise]

    def warm_start(self, cfg: Config, task: Task) -> Any:
        if cfg.seed not in self.warm:
            self.warm[cfg.seed] = warm_policy(cfg, task, self.engine(cfg, ""))
        return copied(self.warm[cfg.seed])

    def score(self, cfg: Config, task: Task, policy: Any) -> float:
        """Held-out accuracy by the right engine; of the warm start where there is no policy."""
        right = self.engine(cfg, "")
        right.load(self.warm_start(cfg, task) if policy is None else policy, 0)
        return evaluate_held_out(right, task.held_out_prompts(), task, version=0)[0][
            "eval/accuracy"
        ]

    def run(self, line: Line, seed: int) -> dict[str, float]:
        cfg = self.config(line, seed)
        task, tx, a = open_task(cfg), rl_optimizer(cfg), algorithm_from_config(cfg)
        if line.name == START:
            return dict.fromkeys(COLUMNS, 0.0) | {"accuracy": self.score(cfg, task, None)}
        at = Position("rl", 0, init_rl_state(self.warm_start(cfg, task), cfg, tx), None)
        engine = self.engine(cfg, line.noise)
        if isinstance(engine, NoisyEngine):
            engine.restart()
        scorer: Callable[..., Scorer] = Scorer
        if line.noise == "forward" and a.old_logp != "detached":  # else there is one forward
            scorer = TwoFaced
        program = partial(rl_program, make_scorer=scorer)
        with quiet_job(cfg, task, engine, at, rl_program=program) as job:
            train.train_rl(job)
            rows = [
                r
                for r in read_metrics(job.work / "metrics.jsonl")
                if r["stage"] == "rl" and r["step"] > 0
            ]
        last = np.array([r["reward/mean"] for r in rows[-10:]])
        return {
            "accuracy": self.score(cfg, task, job.position.state.params.policy),
            "reward_std": float(last.std()),
            "grad_max": max(r["grad/norm"] for r in rows),
            "clip": float(np.mean([r["policy/clip_frac"] for r in rows])),
            "gap": float(np.mean([r["train_rollout_logprob_abs_diff"] for r in rows])),
            "ratio": float(np.mean([abs(r["policy/ratio_mean"] - 1) for r in rows])),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", default="", help="lines whose name matches this")
    parser.add_argument("--json", type=Path, default=Path("objectives.json"))
    args = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)  # a line's seeds share its programs
        table(args, Bench(args.steps))


def table(args: argparse.Namespace, bench: Bench) -> None:
    store = ResultsStore(args.json)
    print("| | accuracy, by seed | mean | reward's spread | clipped | gap | largest gradient |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for line in LINES:
        if not re.search(args.only, line.name):
            continue
        runs = [
            store.get_or_run(
                {"run": f"{line.name}; {args.steps} steps; seed {seed}"},
                lambda line=line, seed=seed: bench.run(line, seed),
            )
            for seed in range(args.seeds)
        ]
        each = " ".join(f"{r['accuracy']:.2f}" for r in runs)
        mean = {name: np.mean([r[name] for r in runs]) for name in runs[0]}
        shown = [f"| {line.name} | {each} | {mean['accuracy']:.2f} |"]
        if line.name != START:
            shown.append(f"{mean['reward_std']:.3f} | {mean['clip']:.3f} | {mean['gap']:.1e} |")
            shown.append(f"{max(r['grad_max'] for r in runs):.1f} |")
        print(" ".join(shown), flush=True)


if __name__ == "__main__":
    main()
