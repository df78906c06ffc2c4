# SPDX-License-Identifier: Apache-2.0
"""Weights for a vLLM in this process: its tensors are views of jax's arrays, by DLPack.

The only module of the product that imports torch, and inside one function: who calls it has vLLM,
hence torch. Next: jaxmoe/vllm_plugin/tensor_mailbox.py, where the two sides meet.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxmoe.checkpoint.entries import entries, leaf_of
from jaxmoe.checkpoint.hf import gather_entry
from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate, digested, sent_as


@runtime_checkable
class Mailbox(Protocol):
    """Where the two sides meet: jaxmoe.vllm_plugin.tensor_mailbox, which belongs to vLLM's side."""

    def put(
        self, key: str, manifest: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]
    ) -> None: ...

    def take(self, key: str) -> object: ...


def share_in_process(
    params: Params, cfg: ModelConfig, *, dtype: str, run: str, version: int, mailbox: Mailbox,
    manifest: ManifestDict | None = None,
) -> WeightUpdate:  # fmt: skip
    """Leave the weights in this process's mailbox, as {"mailbox": "<run>:<version>"}.

    Nothing is copied but what must be: gate and up are interleaved and dtypes cast one tensor at
    a time, while the engine asks for it; matrices are transposed views. `params` must stay until
    the engine has taken them. They are taken once: to send them again, call this again.
    """
    manifest = manifest or digested(params, cfg, dtype=dtype, run=run, version=version)
    key = f"{run}:{version}"
    mailbox.put(key, manifest, _tensors(params, cfg, dtype))
    return WeightUpdate(manifest, {"mailbox": key}, close=partial(_take_back, mailbox, key))


def _take_back(mailbox: Mailbox, key: str) -> None:
    mailbox.take(key)


def _tensors(params: Params, cfg: ModelConfig, dtype: str) -> Iterator[tuple[str, Any]]:
    import torch

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
        tensor = tensor.to(getattr(torch, sent_as(entry, dtype)))
        if entry.layout in ("gate_up", "gate_up_bias"):
            half = tensor.shape[-1] // 2
            halves = (tensor[..., :half], tensor[..., half:])
            tensor = torch.stack(halves, -1).flatten(-2)
        yield entry.name, tensor
