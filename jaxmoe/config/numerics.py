# SPDX-License-Identifier: Apache-2.0
"""What `model.numerics=invariant` cannot be with: everything that would break its promise unseen.

Next: jaxmoe/model/invariant.py.
"""

import math
from typing import TYPE_CHECKING

from jaxmoe.config.errors import require

if TYPE_CHECKING:
    from jaxmoe.config import Config

MIN_ROWS_PER_DEVICE = (
    8  # rows that the engine decodes at once: a quarter of a tile (pallas_kernels/tiles.py)
)
_OFF = "or --set model.numerics=fast."


def check_numerics(cfg: "Config") -> None:
    """Raises ConfigError for settings under which trainer and engine would not agree to the bit."""
    if cfg.model.numerics != "invariant":
        return
    r = cfg.rollout
    require(
        r.engine == "native",
        f"model.numerics=invariant needs rollout.engine=native, got {r.engine}: its kernels sum in "
        f"orders of their own. Try --set rollout.engine=native, {_OFF}",
    )
    require(
        cfg.kernels in ("auto", "xla", "mosaic_gpu", "mosaic_tpu"),
        f"model.numerics=invariant needs kernels=auto, got {cfg.kernels}: only XLA's pieces on a "
        f"CPU and Mosaic's kernels were shown to be invariant. Try --set kernels=auto, {_OFF}",
    )
    m = cfg.mesh
    alone = m.data * m.fsdp  # devices with rows of their own and all that these are multiplied with
    require(
        m.devices == alone,
        f"model.numerics=invariant goes with mesh.data and mesh.fsdp, got mesh.expert={m.expert}, "
        f"mesh.sequence={m.sequence}, mesh.tensor={m.tensor}: sums over their devices have an "
        f"order of their own. Try --set mesh.fsdp={m.devices // m.data} --set mesh.expert=1 --set "
        f"mesh.sequence=1 --set mesh.tensor=1, {_OFF}",
    )
    rows, fewest = min(r.max_parallel_sequences, r.sequences_per_step), MIN_ROWS_PER_DEVICE * alone
    parts = math.lcm(r.samples_per_prompt, cfg.optim.microbatches, cfg.loss.minibatches)
    require(
        rows >= fewest,
        f"model.numerics=invariant computes {4 * MIN_ROWS_PER_DEVICE} rows at a time on each "
        f"device, and the engine decodes {rows} at once on {alone}: more than 3 of 4 would be "
        "discarded. Try "
        f"--set rollout.max_parallel_sequences={fewest} --set rollout.sequences_per_step="
        f"{-(-fewest // parts) * parts}, {_OFF}",
    )
