# SPDX-License-Identifier: Apache-2.0
"""A GRPO training loop of your own: python docs/examples/train_loop.py

A random GPT-OSS of two layers learns to answer with even token ids. Everything here is a function
of jaxmoe that `python -m jaxmoe.train` calls too; replace any of them by your own.
"""

import jax
import numpy as np

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.config import OptimConfig
from jaxmoe.model import init_params, plain_ops, tiny
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.terms import kl_term
from jaxmoe.rl.update import jit_step
from jaxmoe.rollout.native import NativeEngine

STEPS, PROMPTS, SAMPLES, NEW_TOKENS, PAD_ID = 20, 8, 8, 8, 0
CONTEXT = 4 + NEW_TOKENS


def make_prompts(rng: np.random.Generator, vocab_size: int) -> list[Prompt]:
    """Prompts of four random tokens; a task of yours would tokenize questions here."""
    tokens_PT = rng.integers(1, vocab_size, (PROMPTS, 4))
    return [
        Prompt(id=i, text="", tokens=tuple(row.tolist()), answer=None)
        for i, row in enumerate(tokens_PT)
    ]


def score(rollout: Rollout) -> float:
    """The reward of one answer: the share of its tokens that are even."""
    return float(np.mean(rollout.tokens % 2 == 0))


def main(steps: int = STEPS) -> list[float]:
    """Train, print the mean reward of each step, and return them."""
    cfg, ops = tiny(vocab_size=64), plain_ops()
    rng = np.random.default_rng(0)
    params = init_params(jax.random.key(0), cfg)

    engine = NativeEngine(
        cfg, ops, max_prompt_tokens=4, max_new_tokens=NEW_TOKENS, max_rows=PROMPTS * SAMPLES
    )
    sampling = Sampling(max_new_tokens=NEW_TOKENS, stop_ids=())

    # GRPO with a small KL penalty against the weights that training starts from
    algorithm = Algorithm(terms=(kl_term(1e-3),))
    tx = make_optimizer(OptimConfig(lr=3e-3), steps=steps)
    reference = jax.tree.map(np.asarray, params)
    state = init_state(Trained(params), tx, Frozen(reference=reference))
    step_fn = jit_step(tx=tx, algorithm=algorithm, scorer=Scorer(cfg, ops), donate_argnums=0)

    rewards = []
    for step in range(1, steps + 1):
        engine.load(state.params.policy, step - 1)
        rollouts = engine.generate(
            make_prompts(rng, cfg.vocab_size), sampling, seed=step, samples=SAMPLES
        )
        rewards_B = np.array([score(rollout) for rollout in rollouts])
        batch = rollout_batch(rollouts, rewards_B, samples=SAMPLES, length=CONTEXT, pad_id=PAD_ID)
        state, metrics, _ = step_fn(state, batch)
        rewards.append(float(rewards_B.mean()))
        gap = float(metrics["train_rollout_logprob_abs_diff"])
        print(f"step {step:2}  reward {rewards[-1]:.3f}  engine gap {gap:.1e}", flush=True)
    engine.close()
    return rewards


if __name__ == "__main__":
    main()
