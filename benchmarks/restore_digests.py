# SPDX-License-Identifier: Apache-2.0
"""What the digests of a run's checkpoint cost when it is restored: with and without, in turn.

python benchmarks/restore_digests.py [--rounds 10] [--arrays 24] [--rows 3800] [--columns 2880]

The folder is read from the page cache, so reading is as quick as it gets, and digests as dear.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from jaxmoe.checkpoint import store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--arrays", type=int, default=24)
    parser.add_argument("--rows", type=int, default=3800)
    parser.add_argument("--columns", type=int, default=2880)
    args = parser.parse_args()
    shape = args.rows, args.columns
    keys = jax.random.split(jax.random.key(0), args.arrays)
    tree = {"policy": {f"w{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}}
    known = store.array_digests(tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        store.save_checkpoint(where, 1, tree, {}, keep=1)
        del tree

        def took(digests: bool) -> float:
            began = time.perf_counter()
            if digests:
                jax.block_until_ready(store.restore_checkpoint(where, 1, like))
            else:
                with patch.object(store, "array_digests", lambda _: known):
                    jax.block_until_ready(store.restore_checkpoint(where, 1, like))
            return time.perf_counter() - began

        took(True)
        for i in range(args.rounds):
            order = (True, False) if i % 2 else (False, True)
            seconds = {which: took(which) for which in order}
            ratios.append(seconds[True] / seconds[False])
            print(f"{seconds[True]:.2f} s with, {seconds[False]:.2f} without: {ratios[-1]:.3f}")
    print(f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
