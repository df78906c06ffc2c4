# SPDX-License-Identifier: Apache-2.0
"""Check that a config keeps the guarantee of `model.numerics=invariant`.

Next: jaxmoe/model/invariant.py.
"""

import math
from typing import TYPE_CHECKING

from jaxmoe.config.engine import describe_engine
from jaxmoe.config.errors import require

if TYPE_CHECKING:
    from jaxmoe.config import Config

# Rows that the engine decodes at once: a quarter of a tile (pallas_kernels/tiles.py). A tile has a
# fixed number of rows, so with fewer rows most of its work is discarded.
MIN_ROWS_PER_DEVICE = 8
_OFF = "or --set model.numerics=fast."


def check_numerics(cfg: "Config") -> None:
    """Raise ConfigError if trainer and engine could not be bitwise equal with these settings."""
    if cfg.model.numerics != "invariant":
        return
    r = cfg.rollout
    require(
        describe_engine(cfg).uses_trainer_forward,
        f"model.numerics=invariant needs rollout.engine=native, got {r.engine}: its kernels sum in "
        f"another order. Try --set rollout.engine=native, {_OFF}",
    )
    require(
        cfg.kernels in ("auto", "xla", "mosaic_gpu", "mosaic_tpu"),
        f"model.numerics=invariant needs kernels=auto, got {cfg.kernels}: only XLA's ops on a "
        f"CPU and Mosaic's kernels are batch-invariant. Try --set kernels=auto, {_OFF}",
    )
    m = cfg.mesh
    batch_devices = m.data * m.fsdp  # devices that compute complete sums for their own rows
    require(
        m.devices == batch_devices,
        f"model.numerics=invariant needs a mesh of data and fsdp, got mesh.expert={m.expert}, "
        f"mesh.sequence={m.sequence}, mesh.tensor={m.tensor}: sums over their devices have "
        f"another order. Try --set mesh.fsdp={m.devices // m.data} --set mesh.expert=1 --set "
        f"mesh.sequence=1 --set mesh.tensor=1, {_OFF}",
    )
    rows, min_rows = (
        min(r.max_parallel_sequences, r.sequences_per_step),
        MIN_ROWS_PER_DEVICE * batch_devices,
    )
    # The suggested number of sequences must be one that the other settings accept.
    parts = math.lcm(r.samples_per_prompt, cfg.optim.microbatches, cfg.loss.minibatches)
    require(
        rows >= min_rows,
        f"model.numerics=invariant computes {4 * MIN_ROWS_PER_DEVICE} rows at a time on each "
        f"device, and the engine decodes {rows} at once on {batch_devices}: more than 3 of 4 would "
        "be discarded. Try "
        f"--set rollout.max_parallel_sequences={min_rows} --set rollout.sequences_per_step="
        f"{-(-min_rows // parts) * parts}, {_OFF}",
    )
