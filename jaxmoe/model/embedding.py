# SPDX-License-Identifier: Apache-2.0
"""Embedding rows of a batch's tokens on the device; the full table stays in host memory.

A step reads one row per token, a small part of a large vocabulary's table. numpy gathers the rows
before the step, and they take the place of the table. Next: jaxmoe/model/layers.py.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.config import ConfigError
from jaxmoe.shapes import Leaf, Params

# The id at padding positions of packed rows.
PAD_TOKEN_ID = 0


@struct.dataclass
class EmbeddingRows:
    """Rows of the embedding table by token id, in rising order; any other token yields NaN."""

    ids_R: Leaf  # int32, distinct; filled up at the end with the vocabulary's size
    rows_RD: Leaf
    vocabulary: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the full table."""
        return self.vocabulary, self.rows_RD.shape[1]

    def look_up(self, tokens_BT: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Return `table[tokens]`, NaN for tokens that have no row."""
        row = jnp.searchsorted(self.ids_R, tokens_BT)
        # searchsorted returns the length for an id above all others, which would not be a valid
        # index.
        row = jnp.minimum(row, self.ids_R.shape[0] - 1)
        is_present = self.ids_R[row] == tokens_BT
        return jnp.where(is_present[..., None], self.rows_RD[row], jnp.nan)


def gather_embedding_rows(base: Params, tokens_BT: Int[np.ndarray, "*B"], size: int) -> Params:
    """Return `base` with its embedding table, which is on the host, replaced by `size` of its rows.

    Raises ConfigError if the tokens need more rows than that.
    """
    table_VD = base["embed"]
    # Packed rows are padded on the device, with a token that may occur in no sequence of the batch.
    ids = np.union1d(tokens_BT, [PAD_TOKEN_ID]).astype(np.int32)
    if len(ids) > size:
        raise ConfigError(
            f"lora.embedding_rows ({size}) must be at least the distinct tokens of a batch; "
            f"this batch has {len(ids)}. Try --set lora.embedding_rows={2 * size}, or 0 for all."
        )
    # Unused entries hold an id above all others, because searchsorted needs rising ids.
    ids_R = np.full(size, len(table_VD), np.int32)
    ids_R[: len(ids)] = ids
    rows_RD = np.zeros((size, table_VD.shape[1]), table_VD.dtype)
    rows_RD[: len(ids)] = table_VD[ids]
    return base | {"embed": EmbeddingRows(ids_R, rows_RD, len(table_VD))}
