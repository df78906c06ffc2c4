# SPDX-License-Identifier: Apache-2.0
"""Bytes of a weight sync that sends only what changed, at the rate of gptoss20b.py.

COMMAND  python -m benchmarks.changed_weights [--experts 1] [--steps 1 10 100 400]

The gate and up matrices of a few experts of the 20B, 2880 x 5760 each, with random weights of the
scale 0.02, rounded to bfloat16 or to four bits, from which float32 masters begin, as after
init.checkpoint. AdamW moves them at 1e-6: by gradients of which half the variance is the same in
each step, or by random ones. The last two of the steps are compared, as a sync does.
"""

import argparse

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from jaxmoe.checkpoint.layouts import CHUNK_BYTES
from jaxmoe.configs import gptoss20b
from jaxmoe.weight_sync.changes import encode_block
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from pallas_kernels.grouped_matmul.mxfp4_stochastic import round_stochastically


def count_sent(old: np.ndarray, new: np.ndarray, itemsize: int) -> tuple[float, float]:
    """Return (share of changed words, bytes of the changes per byte of the weights)."""
    old, new = old.reshape(-1).view(np.uint8), new.reshape(-1).view(np.uint8)
    sent = 0
    for start in range(0, new.size, CHUNK_BYTES):
        mask, changed = encode_block(
            old[start : start + CHUNK_BYTES], new[start : start + CHUNK_BYTES], itemsize
        )
        sent += len(mask) + changed.size
    kind = f"u{itemsize}"
    return float(np.mean(old.view(kind) != new.view(kind))), sent / new.size


def send_bfloat16(w_EDF: jax.Array) -> list[tuple[np.ndarray, int]]:
    return [(np.asarray(w_EDF).astype(ml_dtypes.bfloat16).view(np.uint16), 2)]


def send_codes(w_EDF: jax.Array) -> list[tuple[np.ndarray, int]]:
    packed = ENCODE(w_EDF)
    return [(np.asarray(packed.nibbles_EDF), 1), (np.asarray(packed.scales_EDF), 1)]


ENCODE = jax.jit(lambda w: encode_mxfp4(w, round_magnitude=round_stochastically))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", type=int, default=1)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100, 400])
    args = parser.parse_args()
    cfg = gptoss20b.get_config()
    rate = cfg.optim.lr
    tx = optax.adamw(
        rate, b1=cfg.optim.beta1, b2=cfg.optim.beta2, eps=cfg.optim.eps, weight_decay=0.0
    )
    shape = args.experts, cfg.model.d_model, 2 * cfg.model.d_expert
    first = 0.02 * jax.random.normal(jax.random.key(0), shape)
    constant = jax.random.normal(jax.random.key(1), shape)

    @jax.jit
    def step(w, state, key, share):
        noise = jax.random.normal(key, shape)
        grads = jnp.sqrt(share) * constant + jnp.sqrt(1 - share) * noise
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    forms = {
        "bfloat16": (first.astype(jnp.bfloat16).astype(jnp.float32), send_bfloat16),
        "four bits": (mxfp4_to_dense(encode_mxfp4(first)), send_codes),
    }
    print(f"rate {rate:g}, {np.prod(shape):,} weights; changed words, bytes sent per byte")
    for name, (w, send) in forms.items():
        for share in (0.5, 0.0):
            weights, state = w, tx.init(w)
            for number in range(1, max(args.steps) + 1):
                old = send(weights) if number in args.steps else []
                weights, state = step(weights, state, jax.random.key(number + 2), share)
                parts = list(zip(old, send(weights), strict=True)) if old else []
                if parts:
                    counts = [count_sent(a, b, size) for (a, size), (b, _) in parts]
                    nbytes = [b.nbytes for _, (b, _) in parts]
                    changed, sent = np.average(counts, axis=0, weights=nbytes)
                    print(
                        f"{name:9} {'same direction' if share else 'random':14} step {number:4}  "
                        f"{changed:8.4%}  {sent:.4f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
