# SPDX-License-Identifier: Apache-2.0
"""The weight updates that the tests here make."""

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import map_specs
from jaxmoe.weight_sync.files import write_files

CFG = ModelConfig(
    vocab_size=93, d_model=32, n_layers=4, n_q_heads=6, n_kv_heads=2, head_dim=20, n_experts=10,
    experts_per_token=4, d_expert=24, sliding_window=9, vocab_multiple=8,
)  # fmt: skip
RUN = "0f" * 6


def random_params(cfg: ModelConfig = CFG, dtype: str = "float32"):
    """No two entries agree; the padding of the vocabulary is not 0, so that it would be seen."""
    rng = np.random.default_rng(0)
    return map_specs(lambda s: rng.standard_normal(s.shape, np.float32).astype(dtype), cfg)


def write_update(params, directory, *, dtype="float32", version=3, cfg=CFG):
    return write_files(params, cfg, directory, dtype=dtype, run=RUN, version=version)


def left(directory) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))
