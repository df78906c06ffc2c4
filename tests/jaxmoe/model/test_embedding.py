# SPDX-License-Identifier: Apache-2.0
"""Some rows of the embedding in the place of all: the same numbers, or a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.model.embedding import EmbeddingRows, gather_embedding_rows
from jaxmoe.model.layers import embed_tokens
from jaxmoe.model.params import param_shapes

TABLE_VD = np.random.default_rng(0).standard_normal((29, 5)).astype(jnp.bfloat16)
TOKENS_BT = np.array([[7, 3, 3, 28], [21, 7, 1, 9]], np.int32)


@pytest.mark.parametrize("size", [7, 8, 29])
def test_a_batchs_rows_are_read_like_the_table(size):
    base = gather_embedding_rows({"embed": TABLE_VD, "head": 1}, TOKENS_BT, size)
    assert base["head"] == 1 and base["embed"].rows_RD.shape == (size, 5)
    assert param_shapes(base | {"head": TABLE_VD})["embed"] == (29, 5)
    read = jax.jit(embed_tokens, static_argnums=2)
    for tokens in (TOKENS_BT, np.zeros((2, 3), np.int32)):  # empty places hold token 0
        actual, expected = (read(tokens, w, "float32") for w in (base["embed"], TABLE_VD))
        np.testing.assert_array_equal(actual, expected)
        assert actual.dtype == jnp.float32


def test_a_token_without_a_row_is_nan():
    rows = gather_embedding_rows({"embed": TABLE_VD}, TOKENS_BT, 9)["embed"]
    assert isinstance(rows, EmbeddingRows)
    for missing in (2, 22, 27):
        rows_found = rows.look_up(jnp.array([missing, 3]))
        assert jnp.isnan(rows_found[0]).all() and not jnp.isnan(rows_found[1]).any()


def test_more_tokens_than_rows_suggest_a_number():
    with pytest.raises(ConfigError, match="must be at least the distinct .* has 7.* Try --set lo"):
        gather_embedding_rows({"embed": TABLE_VD}, TOKENS_BT, 6)
