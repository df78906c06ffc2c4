# SPDX-License-Identifier: Apache-2.0
"""Our side of the comparison: jaxmoe's engine and training step, answering commands on stdin.

Speaks the protocol of peer_trl.py. Next: compare_trl.py, the parent.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


class Desk:
    """Weights, engine and the compiled functions; every method answers one command."""

    def __init__(self, directory: Path, sizes: argparse.Namespace) -> None:
        import jax
        import numpy as np

        from jaxmoe.batches.sharing_from_config import sharing_from_config
        from jaxmoe.checkpoint.hf import load_params
        from jaxmoe.config import Config, DataConfig, OptimConfig, RolloutConfig
        from jaxmoe.model import plain_ops
        from jaxmoe.model.config import read_hf_config
        from jaxmoe.rl.algorithm import Algorithm
        from jaxmoe.rl.optimizer import make_optimizer
        from jaxmoe.rl.scorer import Scorer
        from jaxmoe.rl.state import Trained, init_state
        from jaxmoe.rl.update import jit_step
        from jaxmoe.rollout.native import NativeEngine

        self.cfg = read_hf_config(directory)
        assert self.cfg.dtype == "float32", self.cfg.dtype
        self.first = jax.tree.map(jax.numpy.array, load_params(directory, self.cfg, "float32"))
        self.ops = plain_ops()
        tx = make_optimizer(OptimConfig(lr=1e-6), steps=10**5)
        self.state = init_state(Trained(jax.tree.map(lambda x: x.copy(), self.first)), tx)
        self.sizes, self.grpo = sizes, Algorithm()
        self.rows = sizes.prompts * sizes.samples
        # what a run would do with these lengths
        lengths = Config(
            model=self.cfg,
            data=DataConfig("random", max_prompt_tokens=sizes.prompt_tokens),
            rollout=RolloutConfig(
                sequences_per_step=self.rows,
                samples_per_prompt=sizes.samples,
                max_new_tokens=sizes.new_tokens,
            ),
            optim=OptimConfig(lr=1e-6),
            steps=1,
        )
        self.sharing = sharing_from_config(lengths, self.ops.attend)
        self.step_fn = jit_step(
            tx=tx, algorithm=self.grpo, scorer=Scorer(self.cfg, self.ops), donate_argnums=0
        )
        self.engine = NativeEngine(
            self.cfg,
            self.ops,
            max_prompt_tokens=sizes.prompt_tokens,
            max_new_tokens=sizes.new_tokens,
            max_rows=self.rows,
        )
        self.engine.load(self.state.params.policy, 0)
        self.dice = np.random.default_rng(0)
        self.steps = 0

    def step(self) -> dict[str, float]:
        """Generate, score, build the batch, update (AdamW included), sync the weights."""
        import jax
        import numpy as np

        from jaxmoe.batches.batch import rollout_batch
        from jaxmoe.records import Prompt, Sampling
        from jaxmoe.rl.minibatches import split_minibatches

        sizes = self.sizes
        shape = sizes.prompts, sizes.prompt_tokens
        ids_PT = self.dice.integers(1, self.cfg.vocab_size, shape)
        prompts = [Prompt(i, "", tuple(row.tolist()), None) for i, row in enumerate(ids_PT)]
        sampling = Sampling(max_new_tokens=sizes.new_tokens, stop_ids=())
        self.steps += 1
        start = time.process_time()
        rollouts = self.engine.generate(prompts, sampling, seed=self.steps, samples=sizes.samples)
        generated = time.process_time()
        rewards = self.dice.random(self.rows, np.float32)
        batch = rollout_batch(
            rollouts,
            rewards,
            samples=sizes.samples,
            length=sizes.prompt_tokens + sizes.new_tokens,
            pad_id=0,
        )
        seed = (self.steps,)
        batch, _ = split_minibatches(batch, self.grpo, seed=seed, sharing=self.sharing)
        self.state, metrics, _ = self.step_fn(self.state, batch)
        metrics = jax.device_get(metrics)
        self.engine.load(self.state.params.policy, self.steps)
        end = time.process_time()
        assert all(len(r.tokens) == sizes.new_tokens for r in rollouts)
        assert np.isfinite(metrics["loss"])
        assert metrics["train_rollout_logprob_abs_diff"] < 1e-4, metrics
        return {
            "generate_cpu_s": generated - start,
            "train_cpu_s": end - generated,
            "step_cpu_s": end - start,
        }

    def logprobs(self, rows: list[list[int]]) -> list[list[float]]:
        """Of every token but the first, under the weights before any update."""
        import jax
        import jax.numpy as jnp

        from jaxmoe.model import forward, sequence_logprobs

        @jax.jit
        def run(params, tokens_BT):
            hidden_BTD, _, _ = forward(params, tokens_BT, self.cfg, self.ops)
            return sequence_logprobs(params, hidden_BTD, tokens_BT, self.cfg, self.ops)[0]

        return run(self.first, jnp.asarray(rows, jnp.int32))[:, 1:].tolist()

    def attention(self, repeats: int = 3) -> float:
        """Forward and backward of attention with sinks: 1 x 16q/2kv x 64, T=1024, causal."""
        import jax

        from pallas_kernels import sink_attention

        keys = jax.random.split(jax.random.key(1), 5)
        q, k, v, weight = (
            jax.random.normal(key, (1, 1024, n, 64))
            for key, n in zip(keys, (16, 2, 2, 16), strict=False)
        )
        sinks = jax.random.normal(keys[4], (16,))

        @jax.jit
        def both(q, k, v, sinks, weight):
            out, pull = jax.vjp(lambda *args: sink_attention(*args)[0], q, k, v, sinks)
            return out, pull(weight)

        times = []
        for _ in range(repeats + 1):
            start = time.process_time()
            jax.block_until_ready(both(q, k, v, sinks, weight))
            times.append(time.process_time() - start)
        return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--stock-malloc", action="store_true")
    for name in ("prompts", "samples", "prompt-tokens", "new-tokens", "peer-parts"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})  # before jax counts the cores
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from jaxmoe.distributed.host import keep_freed_memory

    if not args.stock_malloc:
        keep_freed_memory()  # as the train command does; peer_trl.py sets the same
    desk = Desk(args.directory, args)
    for _ in range(3):
        desk.step()
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "step":
            value = desk.step()
        elif command == "logprobs":
            value = desk.logprobs(json.loads(rest))
        elif command == "attention":
            value = desk.attention()
        else:
            break
        print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main()
