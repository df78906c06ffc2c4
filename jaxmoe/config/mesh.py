# SPDX-License-Identifier: Apache-2.0
"""Config of the devices: how many along each axis. Next: jaxmoe/parallel/sharding.py."""

import math
from dataclasses import dataclass

from jaxmoe.config.errors import POSITIVE, check_fields, require


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis; the product is the number of all devices."""

    data: int = 1  # full copies of the model
    fsdp: int = 1  # shards weights, gradients and moments
    expert: int = 1  # shards experts, and other weights as fsdp does
    sequence: int = 1  # shards the tokens of a row, and weights as fsdp does
    tensor: int = 1  # shards heads and experts
    attention: str = "ring"  # or zigzag, or ulysses: attention over the shards of a row

    def __post_init__(self) -> None:
        check_fields("mesh", self, **{name: (*POSITIVE, 1) for name in self.sizes})
        require(
            self.attention in ("ring", "zigzag", "ulysses"),
            f"mesh.attention must be ring, zigzag or ulysses, got {self.attention!r}. "
            "Try --set mesh.attention=ring.",
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along each axis."""
        return {name: value for name, value in vars(self).items() if name != "attention"}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def row_shards(self) -> int:
        """Number of shards of the rows of a batch."""
        return self.data * self.fsdp * self.expert
