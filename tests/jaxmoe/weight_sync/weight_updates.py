# SPDX-License-Identifier: Apache-2.0
"""The weight updates that the tests here make."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from jaxmoe.checkpoint.hf import iter_hf
from jaxmoe.config import ModelConfig
from jaxmoe.model.params import map_specs
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.files import write_files
from tests.jaxmoe.small_models import TEN_EXPERTS

CFG = replace(TEN_EXPERTS, n_layers=4)
RUN = "0f" * 6


def random_params(cfg: ModelConfig = CFG, dtype: str = "float32"):
    """No two entries agree; the padding of the vocabulary is not 0, so that it would be seen."""
    rng = np.random.default_rng(0)
    return map_specs(lambda s: rng.standard_normal(s.shape, np.float32).astype(dtype), cfg)


def write_update(params, directory, *, dtype="float32", version=3, cfg=CFG):
    return write_files(params, cfg, directory, dtype=dtype, run=RUN, version=version)


def travels_as(name: str, dtype: str) -> str:
    """Only what the forward rounds is rounded on its way: matrices, by the name of each."""
    ends = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj", "embed_tokens.weight")
    return dtype if name.endswith((*ends, "lm_head.weight")) else "float32"


def sent_tensors(params, cfg, dtype: str):
    """(name, array) as each must arrive, in the checkpoint's order."""
    exact = dict(iter_hf(params, cfg, "float32"))
    for name, array in iter_hf(params, cfg, dtype):
        yield name, array if travels_as(name, dtype) == dtype else exact[name]


def list_leftovers(directory) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


PARAMS = random_params()  # of a version, which `change` makes to the next


def change(params, seed, frac=0.01):
    """Return weights of which few values are others."""
    rng = np.random.default_rng(seed)

    def change_leaf(x):
        chosen = rng.random(x.shape) < frac
        return np.where(chosen, x + np.float32(1.0), x).astype(np.float32)

    return jax.tree.map(change_leaf, params)


def folders_of(file):
    return [Path(file.update_info["path"]), *map(Path, file.update_info["changes"])]


def receive(kept, file):
    """Return the tensors whose digests are not the manifest's."""
    raw, digests = kept.read(folders_of(file)), file.digests
    assert raw.keys() == digests.keys()
    return [name for name in raw if digest_array(raw[name]) != digests[name]]
