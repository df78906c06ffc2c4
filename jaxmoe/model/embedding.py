# SPDX-License-Identifier: Apache-2.0
"""The embedding's rows of a batch's tokens, on the device; the whole table waits on the host.

A step reads a row for each token, which for a large vocabulary is a small part of the table. They
are gathered by numpy before the step, a leaf in the table's place. Next: jaxmoe/model/layers.py.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.config import ConfigError
from jaxmoe.shapes import Leaf, Params

FILLER = 0  # the id of empty places in packed rows


@struct.dataclass
class EmbeddingRows:
    """Rows of the embedding by their tokens, in rising order; of any other token NaN."""

    ids_R: Leaf  # int32, distinct; behind the last one the vocabulary's size
    rows_RD: Leaf
    vocabulary: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The table's."""
        return self.vocabulary, self.rows_RD.shape[1]

    def of(self, tokens_BT: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """What `table[tokens]` is."""
        at = jnp.searchsorted(self.ids_R, tokens_BT)
        at = jnp.minimum(at, self.ids_R.shape[0] - 1)
        there = self.ids_R[at] == tokens_BT
        return jnp.where(there[..., None], self.rows_RD[at], jnp.nan)


def rows_of(base: Params, tokens_BT: Int[np.ndarray, "*B"], size: int) -> Params:
    """`base`, whose embedding is a table on the host, with `size` rows of it: of these tokens.

    Raises ConfigError where they are more.
    """
    table_VD = base["embed"]
    ids = np.union1d(tokens_BT, [FILLER]).astype(np.int32)
    if len(ids) > size:
        raise ConfigError(
            f"lora.embedding_rows ({size}) must be at least the distinct tokens of a batch, and "
            f"this one has {len(ids)}. Try --set lora.embedding_rows={2 * size}, or 0 for all."
        )
    ids_R = np.full(size, len(table_VD), np.int32)
    ids_R[: len(ids)] = ids
    rows_RD = np.zeros((size, table_VD.shape[1]), table_VD.dtype)
    rows_RD[: len(ids)] = table_VD[ids]
    return base | {"embed": EmbeddingRows(ids_R, rows_RD, len(table_VD))}
