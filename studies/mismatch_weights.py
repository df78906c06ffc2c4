# SPDX-License-Identifier: Apache-2.0
"""Weights and masks of each correction by answer length and mismatch, without training.

The engine's logits are the trainer's plus normal noise, drawn anew for each token. So tokens are
independent, and the effective sample size of products of T ratios is (E[r]² / E[r²])^T exactly.
Masks are those of jaxmoe.losses on simulated answers. Next: studies/mismatch_bed.py trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from jaxmoe.losses import (
    drift_mask,
    rejection,
    sequence_is,
    token_icepop,
    token_is,
)
from jaxmoe.losses.aggregation import effective_sample_size
from jaxmoe.observe.plots import save_figure

LENGTHS = (6, 16, 32, 128, 1024, 8192)
MISMATCHES = (0.003, 0.01, 0.03, 0.1)
N_WORDS, LOGIT_DEVIATION = 32, 3.0
N_TOKENS, MAX_ANSWERS, MAX_TOKENS = 2**16, 8192, 2**23
geometric_rejection = partial(rejection, statistic="seq_mean_k1", low=0.999, high=1.001)
k3_rejection = partial(rejection, statistic="seq_mean_k3", high=0.01)


@dataclass(frozen=True)
class NoiseKind:
    """Where the engine differs: at a share of the tokens, the same noise at each of them."""

    name: str
    share: float


NOISE_KINDS = (
    NoiseKind("every token differs", 1.0),
    # As where experts switch: most tokens are equal, and a few are far apart.
    NoiseKind("one token in 20 differs", 0.05),
)


@dataclass(frozen=True)
class LogRatios:
    """Simulated log π_trainer/π_engine of sampled tokens, whose mean size is the mismatch.

    chi2: E[r²] − 1 over all words, exact for the simulated distributions.
    """

    log_ratio_M: np.ndarray
    mismatch: float
    noise: float
    chi2: float


def simulate_log_ratios(mismatch: float, kind: NoiseKind, seed: int = 0) -> LogRatios:
    """Sample tokens of an engine whose mean |Δlogp| is `mismatch` nats.

    The noise is iterated, with equal random numbers: the mean size is a function of it.
    """
    rng = np.random.default_rng(seed)
    shape = (N_TOKENS, N_WORDS)
    logits_MV = rng.normal(0.0, LOGIT_DEVIATION, shape).astype(np.float32)
    noise_MV = rng.normal(size=shape).astype(np.float32)
    noise_MV *= rng.random((shape[0], 1)) < kind.share
    uniform_M1 = rng.random((shape[0], 1))
    trainer_MV = log_softmax(logits_MV)

    def sample(noise: float) -> LogRatios:
        engine_MV = log_softmax(logits_MV + np.float32(noise) * noise_MV)
        probs_MV = np.exp(engine_MV)
        log_ratio_MV = trainer_MV - engine_MV
        # Expectations over the words are exact; only the answers below need a sampled one.
        size = float(np.mean(np.sum(probs_MV * np.abs(log_ratio_MV), axis=1)))
        chi2 = float(np.mean(np.sum(probs_MV * np.exp(2.0 * log_ratio_MV), axis=1)) - 1.0)
        word_M1 = np.sum(np.cumsum(probs_MV, axis=1) < uniform_M1, axis=1, keepdims=True)
        word_M1 = np.minimum(word_M1, N_WORDS - 1)
        return LogRatios(np.take_along_axis(log_ratio_MV, word_M1, axis=1)[:, 0], size, noise, chi2)

    # The size is nearly proportional to the noise.
    ratios = sample(mismatch)
    for _ in range(6):
        ratios = sample(ratios.noise * mismatch / ratios.mismatch)
    return ratios


def log_softmax(logits_MV: np.ndarray) -> np.ndarray:
    shifted_MV = logits_MV - logits_MV.max(axis=1, keepdims=True)
    return shifted_MV - np.log(np.exp(shifted_MV).sum(axis=1, keepdims=True))


def measure_corrections(ratios: LogRatios, length: int, seed: int = 0) -> dict[str, float]:
    """Return what each correction does to answers of `length` such tokens.

    ess: of products of ratios; ess_capped: of those capped at 2, and mean_capped their mean, which
    is 1 without a cap. Others: shares of answers or tokens that a mask drops.
    """
    n_answers = min(MAX_ANSWERS, MAX_TOKENS // length)
    rng = np.random.default_rng((seed, length))
    log_ratio_BT = jnp.asarray(rng.choice(ratios.log_ratio_M, (n_answers, length)))
    # Half of the answers are bad ones.
    is_bad_B1 = jnp.arange(n_answers)[:, None] % 2 == 0
    advantages_BT = jnp.broadcast_to(jnp.where(is_bad_B1, -1.0, 1.0), log_ratio_BT.shape)
    return {
        "ess": float((1.0 + ratios.chi2) ** -length),
        **{name: float(x) for name, x in apply_corrections(log_ratio_BT, advantages_BT).items()},
    }


@jax.jit
def apply_corrections(log_ratio_BT: jax.Array, advantages_BT: jax.Array) -> dict[str, jax.Array]:
    """Return the shares that the corrections drop, and the sizes of samples of their weights."""
    mask_BT = jnp.ones(log_ratio_BT.shape, bool)
    token_BT = token_is(log_ratio_BT).weights_BT
    sequence_BT = sequence_is(log_ratio_BT, mask_BT).weights_BT
    icepop_BT = token_icepop(log_ratio_BT).weights_BT
    drift = drift_mask(log_ratio_BT, advantages_BT, mask_BT, max_drift=0.05)

    def dropped(keep: jax.Array | None) -> jax.Array:
        assert keep is not None
        return jnp.mean(1.0 - keep.astype(jnp.float32))

    assert token_BT is not None and sequence_BT is not None and icepop_BT is not None
    return {
        "ess_capped": effective_sample_size(sequence_BT, mask_BT),
        "mean_capped": jnp.mean(sequence_BT),
        "ess_token": effective_sample_size(token_BT, mask_BT),
        "icepop": dropped(icepop_BT > 0.0),
        "geometric": dropped(geometric_rejection(log_ratio_BT, mask_BT).keep_BT),
        "k3": dropped(k3_rejection(log_ratio_BT, mask_BT).keep_BT),
        # Only bad answers can be dropped.
        "drift": 2.0 * dropped(drift.keep_BT),
    }


COLUMNS = {
    "ess": "ESS of Π r",
    "ess_capped": "ESS, capped at 2",
    "mean_capped": "mean weight, capped",
    "ess_token": "ESS, token weights",
    "icepop": "tokens dropped, IcePop",
    "geometric": "answers dropped, within 0.001",
    "k3": "answers dropped, k3 0.01",
    "drift": "bad answers dropped, drift 0.05",
}
Cells = dict[tuple[float, int], dict[str, float]]  # by mismatch and length


def measure_weights(
    lengths: Sequence[int] = LENGTHS,
    mismatches: Sequence[float] = MISMATCHES,
    report: Callable[[str], None] = print,
) -> dict[NoiseKind, Cells]:
    """Return the figures of all lengths and mismatches, by the kind of noise."""
    results: dict[NoiseKind, Cells] = {}
    for kind in NOISE_KINDS:
        cells: Cells = {}
        for mismatch in mismatches:
            ratios = simulate_log_ratios(mismatch, kind)
            report(f"{kind.name}: mean |Δlogp| {ratios.mismatch:.4f}, noise {ratios.noise:.3g}")
            for length in lengths:
                cells[mismatch, length] = measure_corrections(ratios, length)
        results[kind] = cells
    return results


def format_weights(results: dict[NoiseKind, Cells]) -> str:
    """Return a table of each kind of noise in Markdown."""
    parts = ["`python -m studies mismatch_weights`"]
    for kind, cells in results.items():
        lines = [
            f"**{kind.name[0].upper()}{kind.name[1:]}**",
            "",
            f"| mean abs Δlogp | tokens | {' | '.join(COLUMNS.values())} |",
            "|---|---" + "|---" * len(COLUMNS) + "|",
        ]
        for (mismatch, length), figures in cells.items():
            shares = " | ".join(format_share(figures[name]) for name in COLUMNS)
            lines.append(f"| {mismatch:g} | {length} | {shares} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def format_share(share: float) -> str:
    """A share in per cent, with digits where it is near 0."""
    if 0.0 < share < 1e-5:
        return "<0.001%"
    return f"{100 * share:.1f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def plot_weights(results: dict[NoiseKind, Cells], path: Path) -> None:
    """Draw the effective sample size of sequence weights by length and mismatch."""
    figure = Figure(figsize=(4.6 * len(results), 3.6), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for ax, (kind, cells) in zip(axes, results.items(), strict=True):
        mismatches, lengths = sorted({m for m, _ in cells}), sorted({n for _, n in cells})
        ess = np.array([[cells[m, n]["ess"] for n in lengths] for m in mismatches])
        ax.imshow(ess, origin="lower", vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
        for (y, x), share in np.ndenumerate(ess):
            text = f"{share:.2f}" if share >= 0.005 else "0"
            ax.text(x, y, text, ha="center", va="center")
        ax.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        ax.set_yticks(range(len(mismatches)), [f"{m:g}" for m in mismatches])
        ax.set_xlabel("tokens of an answer")
        ax.set_ylabel("mean |Δlogp|, nats")
        ax.set_title(kind.name)
    figure.suptitle("effective sample size of sequence weights, share of the answers")
    save_figure(figure, path, dpi=110)
