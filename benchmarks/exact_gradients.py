# SPDX-License-Identifier: Apache-2.0
"""The bias and variance of each estimator's gradient where the engine is wrong, without sampling.

    python benchmarks/exact_gradients.py [--lengths 2 4 6 8] [--noise 0.03 0.1 0.3 1]

A policy over 3 tokens whose logits depend on the place and on the token before; an engine whose
logits have normal noise; the reward is the share of tokens that are right, and half as much again
for a whole answer. All sequences are enumerated, each goes through jaxmoe's own objective and
corrections as a row of its own, and the sums are weighed by the engine's probabilities: nothing is
sampled. Where tokens are dropped, the loss divides by what is left (kept_token_mean). Figures pool
16 such policies: roots of summed squares.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import losses
from jaxmoe.batches.batch import Batch
from jaxmoe.losses import rejection, sequence_icepop, sequence_is, token_icepop, token_is
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.loss import sum_terms

WORDS, POLICIES = 3, 16
GEO = partial(rejection, statistic="seq_mean_k1", low=0.999, high=1.001)
K3 = partial(rejection, statistic="seq_mean_k3", high=0.01)


def weighted(*corrections) -> Algorithm:
    return Algorithm(rollout_correction=corrections)


ESTIMATORS = {
    "no correction": weighted(),
    "`token_is(high=2.0)`": weighted(token_is),
    "`token_is(low=0.5, high=2.0)`": weighted(partial(token_is, low=0.5)),
    "`geometric_is(high=2.0)`": weighted(losses.geometric_is),
    "`sequence_is(high=2.0)`": weighted(sequence_is),
    "`sequence_is(high=inf)`": weighted(partial(sequence_is, high=float("inf"))),
    "`token_icepop(low=0.5, high=5.0)`": weighted(token_icepop),
    "`sequence_icepop(high=3.0)`": weighted(sequence_icepop),
    "`rejection(statistic='seq_mean_k1', low=0.999, high=1.001)`": weighted(GEO),
    "`rejection(statistic='seq_mean_k3', high=0.01)`": weighted(K3),
    "`rejection(statistic='seq_mean_k3', high=0.01) + token_is`": weighted(K3, token_is),
    "`old_logp=rollout`, `ppo_clip`": Algorithm(old_logp="rollout"),
    "`old_logp=rollout`, `gspo`": Algorithm(losses.gspo, old_logp="rollout"),
    "`old_logp=rollout`, `cispo`": Algorithm(losses.cispo, old_logp="rollout"),
}


def log_probs(logits_TPV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Of each token; the row before the first is P = 0."""
    before_BT = jnp.pad(tokens_BT[:, :-1] + 1, ((0, 0), (1, 0)))
    place_T = jnp.arange(tokens_BT.shape[1])
    return jax.nn.log_softmax(logits_TPV)[place_T, before_BT, tokens_BT]


def row_gradient(a: Algorithm, logits, engine, tokens_T, advantage):
    """(the gradient that one sequence asks for, the share of its tokens that were kept)."""
    tokens_BT, mask_BT = tokens_T[None], jnp.ones((1, len(tokens_T)), bool)
    batch = Batch(
        None, None, mask_BT.astype(jnp.int32), mask_BT, log_probs(engine, tokens_BT), None
    )
    batch = replace(
        batch,
        advantages_BT=jnp.full(mask_BT.shape, advantage),
        loss_weights_BT=jnp.ones(mask_BT.shape),
        shared={"total": jnp.float32(mask_BT.size)},
    )

    def loss(logits):
        logp_BT = log_probs(logits, tokens_BT)
        total, aux = sum_terms(a, batch, {"logp_BT": logp_BT, "entropy_BT": logp_BT})
        keep_BT = aux.rows["correction"].keep_BT
        keep_BT = mask_BT if keep_BT is None else mask_BT & keep_BT
        return -total, jnp.mean(keep_BT.astype(jnp.float32))

    grad, kept = jax.grad(loss, has_aux=True)(logits)
    return grad.reshape(-1), kept


@partial(jax.jit, static_argnums=0)
def gradients(a: Algorithm, logits, engine, tokens_NT, advantages_N):
    return jax.vmap(partial(row_gradient, a), (None, None, 0, 0))(
        logits, engine, tokens_NT, advantages_N
    )


def every(length: int) -> jax.Array:
    return jnp.array(list(itertools.product(range(WORDS), repeat=length)), np.int32)


def policy(seed: int, length: int, noise: float) -> tuple[jax.Array, jax.Array]:
    """Logits of a policy, and of an engine that has them wrong."""
    dice, shape = np.random.default_rng((seed, length)), (length, WORDS + 1, WORDS)
    logits, error = (jnp.asarray(dice.normal(size=shape), jnp.float32) for _ in range(2))
    return logits, logits + noise * error


def mean_gap(length: int, noise: float) -> float:
    """Mean |Δlogp| of the tokens that the engines draw, nats: what a run's metrics show."""
    tokens, gaps = every(length), []
    for seed in range(POLICIES):
        ours, theirs = (np.float64(log_probs(x, tokens)) for x in policy(seed, length, noise))
        gaps.append(np.exp(theirs.sum(1)) @ np.abs(ours - theirs).mean(1))
    return float(np.mean(gaps))


def figures(a: Algorithm, length: int, noise: float) -> np.ndarray:
    """(relative bias, relative deviation of one sequence, cosine), of all policies together."""
    tokens, found = every(length), []
    for seed in range(POLICIES):
        logits, engine = policy(seed, length, noise)
        right = np.asarray(tokens) == np.random.default_rng((seed, length, 1)).integers(
            0, WORDS, length
        )
        rewards = right.mean(axis=1) + 0.5 * right.all(axis=1)
        p, q = (np.exp(np.float64(log_probs(x, tokens).sum(1))) for x in (logits, engine))
        advantages = np.float32(rewards - q @ rewards)  # what the mean of large groups takes off
        exact, _ = gradients(Algorithm(), logits, logits, tokens, advantages)
        want = p @ np.float64(exact)
        each, kept = (np.float64(x) for x in gradients(a, logits, engine, tokens, advantages))
        each /= max(q @ kept, 1e-30)
        mean = q @ each
        squares = (x @ x for x in (mean - want, mean, want))
        found.append((*squares, q @ np.square(each - mean).sum(1), mean @ want))
    bias, size, true, spread, dot = np.sum(found, axis=0)
    return np.array(
        [np.sqrt(bias / true), np.sqrt(spread / true), dot / max(np.sqrt(size * true), 1e-30)]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0])
    args = parser.parse_args()
    for length in args.lengths:
        print(f"\nlength {length}: relative bias, relative deviation, cosine\n")
        gaps = [mean_gap(length, x) for x in args.noise]
        heads = (f" noise {x:g}: {gap:.2g} nats |" for x, gap in zip(args.noise, gaps, strict=True))
        print("| mean abs Δlogp |" + "".join(heads))
        print("|---" * (len(args.noise) + 1) + "|")
        for name, a in ESTIMATORS.items():
            cells = (figures(a, length, noise) for noise in args.noise)
            row = (f"{b:.2f}, {s:.1f}, {c:.2f}" for b, s, c in cells)
            print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
