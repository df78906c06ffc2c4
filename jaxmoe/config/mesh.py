# SPDX-License-Identifier: Apache-2.0
"""Config of the devices: how many along each axis. Next: jaxmoe/parallel/sharding.py."""

import math
from dataclasses import dataclass

from jaxmoe.config.settings import Section, at_least, one_of, setting


@dataclass(frozen=True)
class MeshConfig(Section, key="mesh", resume=True):
    """Number of devices along each axis; the product is the number of all devices."""

    data: int = setting(1, "full copies of the model", at_least(1))
    fsdp: int = setting(1, "shards of weights, gradients and moments", at_least(1))
    expert: int = setting(1, "shards of experts, and of other weights as fsdp", at_least(1))
    sequence: int = setting(1, "shards of a row's tokens, and of weights as fsdp", at_least(1))
    tensor: int = setting(1, "shards of heads and experts", at_least(1))
    attention: str = setting(
        "ring", "attention over the shards of a row", one_of("ring", "zigzag", "ulysses")
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
