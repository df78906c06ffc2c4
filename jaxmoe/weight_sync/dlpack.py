# SPDX-License-Identifier: Apache-2.0
"""Weights for a vLLM in this process: its tensors are views of jax arrays, by DLPack.

This is the only module of the product that imports torch, and it does so inside one function:
whoever calls it has vLLM and therefore torch. Next: jaxmoe/vllm/plugin/tensor_mailbox.py, where the
two sides meet.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxmoe.checkpoint.entries import leaf_of
from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.sent_tensors import Experts, gather_sent, list_sent, sent_dtype
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate, compute_manifest


@runtime_checkable
class Mailbox(Protocol):
    """The interface of jaxmoe.vllm.plugin.tensor_mailbox, which belongs to vLLM's side."""

    def put_update(
        self, key: str, manifest: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]
    ) -> None: ...

    def pop_update(self, key: str) -> object: ...


def share_in_process(
    params: Params,
    cfg: ModelConfig,
    *,
    dtype: str,
    run: str,
    version: int,
    mailbox: Mailbox,
    experts: Experts = "dense",
    manifest: ManifestDict | None = None,
) -> WeightUpdate:
    """Put the weights into this process's mailbox; update_info is {"mailbox": "<run>:<version>"}.

    Only the necessary copies are made: gate and up are interleaved and dtypes cast one tensor at a
    time, while the engine reads them; matrices are transposed views. `params` must stay alive until
    the engine has read them. The update can be read once: call this again to send it again.
    """
    manifest = manifest or compute_manifest(
        params, cfg, dtype=dtype, run=run, version=version, experts=experts
    )
    key = f"{run}:{version}"
    mailbox.put_update(key, manifest, _iterate_tensors(params, cfg, dtype, experts))
    return WeightUpdate(manifest, {"mailbox": key}, close=partial(_withdraw_update, mailbox, key))


def _withdraw_update(mailbox: Mailbox, key: str) -> None:
    mailbox.pop_update(key)


def _iterate_tensors(
    params: Params, cfg: ModelConfig, dtype: str, experts: Experts
) -> Iterator[tuple[str, Any]]:
    import torch

    for entry in list_sent(cfg, experts):
        leaf = leaf_of(params, entry)
        # A sharded array has no single buffer to view.
        if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
            tensor = torch.from_dlpack(leaf)
            tensor = tensor if entry.index is None else tensor[entry.index]
        else:
            # numpy cannot export its bfloat16 by DLPack, jax can.
            tensor = torch.from_dlpack(jnp.asarray(gather_sent(params, entry)))
        if entry.layout in ("transpose", "transpose_pad"):
            tensor = tensor.t()
        if entry.layout in ("pad_rows", "transpose_pad"):
            tensor = tensor[: cfg.vocab_size]
        tensor = tensor.to(getattr(torch, sent_dtype(entry, dtype)))
        if entry.layout in ("gate_up", "gate_up_bias"):
            half = tensor.shape[-1] // 2
            halves = (tensor[..., :half], tensor[..., half:])
            tensor = torch.stack(halves, -1).flatten(-2)
        yield entry.name, tensor
