# SPDX-License-Identifier: Apache-2.0
"""Is what the native engine samples what it reports? Counts against exact probabilities.

python benchmarks/sampling.py [--draws 100000000] [--words 201088] [--rounds 20]

Four rows of logits at the real vocabulary: decades of probability down to 1e-12, each with words
enough to be seen; normal logits of deviation 3; the same cut by top-k 1,000, and by top-p 0.95. For
each: samples of words that were cut off (must be 0), and by decade of the exact float64
probability the samples counted and expected, their ratio, and chi-square over all bins with 20
expected samples or more. Beside it the inverse CDF over a float32 cumsum with 23 random bits that
the engine once used, of a hundredth as many samples, and the time of both, in turn.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.stats import chi2

from jaxmoe.rollout.sampling import IMPOSSIBLE_LOGIT, apply_top_k_top_p, sample_tokens

CHUNK = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=float, default=1e8)
    parser.add_argument("--words", type=int, default=201_088)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}")
    samplers = {"race": race, "inverse CDF": inverse_cdf}
    for seed, (name, logits_V) in enumerate(rows(args.words).items()):
        for sampler, draws in (("race", args.draws), ("inverse CDF", args.draws / 100)):
            counts_V = count(samplers[sampler], logits_V, int(draws) // CHUNK + 1, seed)
            print(f"\n{name}, {sampler}, {counts_V.sum():,} samples")
            report(np.asarray(logits_V), counts_V)
    clock(args.words, args.rounds, samplers)


def rows(words: int) -> dict[str, jax.Array]:
    """Logits by name; each decade of the first has words enough for its mass."""
    rng = np.random.default_rng(0)
    probs = []
    for power in range(12, 1, -1):
        many = min(words // 2, round(10.0 ** (power - 5))) if power > 5 else 3
        many = min(many, (words - sum(map(len, probs))) // 2)
        probs.append(10.0 ** -(power - rng.random(many)))
    rest = np.full(words - sum(map(len, probs)), 1.0)
    tail = np.concatenate(probs)
    rest *= (1 - tail.sum()) / rest.sum() if len(rest) < 100 else 1e-13
    all_V = np.concatenate([tail, rest])
    all_V = np.append(all_V[:-1], 1 - all_V[:-1].sum())
    normal_V = jnp.asarray(rng.normal(0, 3, words), jnp.float32)
    return {
        "decades": jnp.asarray(np.log(rng.permutation(all_V)), jnp.float32),
        "deviation 3": normal_V,
        "deviation 3, top-k 1,000": apply_top_k_top_p(normal_V[None], top_k=1000, top_p=1.0)[0],
        "deviation 3, top-p 0.95": apply_top_k_top_p(normal_V[None], top_k=0, top_p=0.95)[0],
    }


def race(key: jax.Array, logits_V: jax.Array) -> jax.Array:
    return sample_tokens(logits_V[None], key[None], greedy=False)[0][0]


def inverse_cdf(key: jax.Array, logits_V: jax.Array) -> jax.Array:
    """The first word whose cumulative weight passes u times the total."""
    cumulative_V = jnp.cumsum(jnp.exp(logits_V - jnp.max(logits_V)))
    return jnp.argmax(cumulative_V > jax.random.uniform(key) * cumulative_V[-1])


def count(sampler, logits_V: jax.Array, chunks: int, seed: int) -> np.ndarray:  # noqa: ANN001
    """How often each word was sampled; integers, in batches that a device has memory for."""

    @jax.jit
    def add(counts_V: jax.Array, start: jax.Array, logits_V: jax.Array) -> jax.Array:
        def one(i: jax.Array, counts_V: jax.Array) -> jax.Array:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), start + i), CHUNK)
            tokens = jax.vmap(partial(sampler, logits_V=logits_V))(keys)
            return counts_V.at[tokens].add(1)

        return lax.fori_loop(0, per_call, one, counts_V)

    per_call = min(chunks, 64)
    counts_V = jnp.zeros(len(logits_V), jnp.int32)
    began = time.perf_counter()
    for start in range(0, chunks, per_call):
        counts_V = add(counts_V, jnp.int32(start), logits_V)
        if start == 0:
            jax.block_until_ready(counts_V)
    counts = np.asarray(counts_V)
    print(f"{time.perf_counter() - began:.1f} s")
    return counts


def report(logits_V: np.ndarray, counts_V: np.ndarray) -> None:
    """By decade, and over bins of 20 expected samples or more."""
    n, kept_V = counts_V.sum(), logits_V > IMPOSSIBLE_LOGIT / 2
    print(f"samples of words that were cut off: {counts_V[~kept_V].sum()}")
    exact_V = np.where(kept_V, logits_V.astype(np.float64), -np.inf)
    exact_V = np.exp(exact_V - exact_V.max())
    exact_V /= exact_V.sum()
    decades_V = np.floor(np.log10(np.where(kept_V, exact_V, 1.0)) + 1e-7).astype(int)
    for decade in range(decades_V.min(), 1):
        words_V = kept_V & (decades_V == decade)
        want, got = n * exact_V[words_V].sum(), counts_V[words_V].sum()
        if words_V.any() and want > 0.05:
            sigma = (got - want) / np.sqrt(want * (1 - want / n) + 1e-9)
            print(
                f"  p of 1e{decade:+d}: {words_V.sum():7,} words, expected {want:14,.1f}, sampled "
                f"{got:13,}, ratio {got / want:.4f}, {sigma:+.1f} sigma"
            )
    order = np.argsort(exact_V)[::-1][: kept_V.sum()]
    want_N, got_N = n * exact_V[order], counts_V[order]
    alone = want_N >= 20
    edges = np.floor(np.cumsum(want_N[~alone]) / 20).astype(int)  # rarer words share bins
    want_M = np.append(want_N[alone], np.bincount(edges, want_N[~alone]))
    got_M = np.append(got_N[alone], np.bincount(edges, got_N[~alone]))
    big = want_M >= 10
    statistic = (np.square(got_M - want_M)[big] / want_M[big]).sum()
    p = chi2.sf(statistic, big.sum() - 1)
    print(f"  chi-square {statistic:,.0f} of {big.sum() - 1:,} degrees of freedom, p = {p:.3g}")
    total = 0.5 * np.abs(got_M / n - want_M / n).sum()
    print(f"  total variation of the bins {total:.2e}; sampling alone {noise(want_M, n):.2e}")


def noise(want_M: np.ndarray, n: int) -> float:
    """The total variation that as many honest samples have on average."""
    return float(0.5 * np.sqrt(2 / np.pi * want_M).sum() / n)


def clock(words: int, rounds: int, samplers: dict) -> None:
    """Milliseconds of a batch, in turn; the logits are another array each time."""
    for rows in (1, 8, 64):
        keys = jax.random.split(jax.random.key(1), rows)
        logits = [jax.random.normal(jax.random.key(i), (rows, words)) * 3 for i in range(2)]
        jitted = {name: jax.jit(jax.vmap(f)) for name, f in samplers.items()}
        spent: dict[str, list[float]] = {name: [] for name in samplers}
        for i in range(rounds + 1):
            for name, f in jitted.items():
                start = time.perf_counter()
                jax.block_until_ready(f(keys, logits[i % 2]))
                if i:
                    spent[name].append(1e3 * (time.perf_counter() - start))
        ms = {name: statistics.median(times) for name, times in spent.items()}
        ratio = ms["race"] / ms["inverse CDF"]
        print(
            f"\n{rows} rows: race {ms['race']:.2f} ms, inverse CDF {ms['inverse CDF']:.2f} ms, "
            f"ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
