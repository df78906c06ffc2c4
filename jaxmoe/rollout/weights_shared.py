# SPDX-License-Identifier: Apache-2.0
"""Weights for a vLLM in this process: its tensors are views of jax's arrays, by DLPack.

The only module of the product that imports torch, and inside one function: who calls it has vLLM,
hence torch. Next: jaxmoe/rollout/vllm/plugin/letterbox.py, where the two sides meet.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.checkpoint.hf import entries, gather_entry, leaf_of
from jaxmoe.config import ModelConfig
from jaxmoe.rollout.vllm.plugin import letterbox
from jaxmoe.rollout.weights import Publication, empty_manifest, fill_digests, plan
from jaxmoe.shapes import Params


def shared(params: Params, cfg: ModelConfig, *, dtype: str, run: str, version: int) -> Publication:
    """Leave the weights in this process's mailbox, as {"mailbox": "<run>:<version>"}.

    Nothing is copied but what must be: gate and up are interleaved and dtypes cast one tensor at
    a time, while the engine asks for it; matrices are transposed views. `params` must stay until
    the engine has taken them. They are taken once: to publish them again, call this again.
    """
    planned = plan(params, cfg, dtype)
    manifest = empty_manifest(planned, run, version)
    fill_digests(params, cfg, planned, manifest)
    key = f"{run}:{version}"
    letterbox.put(key, manifest, _tensors(params, cfg, dtype))
    return Publication(manifest, {"mailbox": key}, close=lambda: _take_back(key))


def _take_back(key: str) -> None:
    letterbox.take(key)


def _tensors(params: Params, cfg: ModelConfig, dtype: str) -> Iterator[tuple[str, Any]]:
    import torch

    wanted = getattr(torch, dtype)
    for entry in entries(cfg):
        leaf = leaf_of(params, entry)
        if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
            tensor = torch.from_dlpack(leaf)
            tensor = tensor if entry.pair is None else tensor[entry.pair]
        else:
            tensor = torch.from_dlpack(jnp.asarray(gather_entry(params, entry)))
        if entry.layout in ("transpose", "transpose_pad"):
            tensor = tensor.t()
        if entry.layout in ("pad_rows", "transpose_pad"):
            tensor = tensor[: cfg.vocab_size]
        tensor = tensor.to(wanted)
        if entry.layout in ("gate_up", "gate_up_bias"):
            half = tensor.shape[-1] // 2
            halves = (tensor[..., :half], tensor[..., half:])
            tensor = torch.stack(halves, -1).flatten(-2)
        yield entry.name, tensor
