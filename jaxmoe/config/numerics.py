# SPDX-License-Identifier: Apache-2.0
"""Check that a config keeps the guarantee of `model.numerics=invariant`.

Next: jaxmoe/model/invariant.py.
"""

import math
from typing import TYPE_CHECKING

from jaxmoe.config.engine import describe_engine
from jaxmoe.config.errors import Needs

if TYPE_CHECKING:
    from jaxmoe.config import Config

# Rows that the engine decodes at once: a quarter of a tile (pallas_kernels/tiles.py). A tile has a
# fixed number of rows, so with fewer rows most of its work is discarded.
MIN_ROWS_PER_DEVICE = 8


def check_numerics(cfg: "Config") -> None:
    """Raise ConfigError if trainer and engine could not be bitwise equal with these settings."""
    if cfg.model.numerics != "invariant":
        return
    needs = Needs(cfg, "model.numerics", "--set model.numerics=fast")
    uses_forward = describe_engine(cfg).uses_trainer_forward
    needs(uses_forward, "rollout.engine=native", "its kernels sum in another order")
    has_kernels = cfg.kernels in ("auto", "xla", "mosaic_gpu", "mosaic_tpu")
    needs(
        has_kernels,
        "kernels=auto",
        "only XLA's ops on a CPU and Mosaic's kernels are batch-invariant",
    )
    m, r = cfg.mesh, cfg.rollout
    batch_devices = m.data * m.fsdp  # devices that compute complete sums for their own rows
    needs(
        m.devices == batch_devices,
        f"mesh.fsdp={m.devices // m.data} mesh.expert=1 mesh.sequence=1 mesh.tensor=1",
        "sums over their devices have another order",
        requirement="a mesh of data and fsdp",
    )
    rows, min_rows = (
        min(r.max_parallel_sequences, r.sequences_per_step),
        MIN_ROWS_PER_DEVICE * batch_devices,
    )
    # The suggested number of sequences must be one that the other settings accept.
    parts = math.lcm(r.samples_per_prompt, cfg.optim.microbatches, cfg.loss.minibatches)
    n_sequences = -(-min_rows // parts) * parts
    needs(
        rows >= min_rows,
        f"rollout.max_parallel_sequences={min_rows} rollout.sequences_per_step={n_sequences}",
        f"a device computes {4 * MIN_ROWS_PER_DEVICE} rows at a time, and would discard 3 of 4",
        requirement=f"{min_rows} sequences at once",
    )
