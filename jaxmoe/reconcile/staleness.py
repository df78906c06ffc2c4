# SPDX-License-Identifier: Apache-2.0
"""Tensors that an engine may still hold of the version before, of every layer or of one.

Next: jaxmoe/reconcile/scalars.py, numbers that are fitted.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.variants import Hypothesis, Variant
from jaxmoe.shapes import Leaf, Params

GROUPS = {  # of tensors that are loaded, and left out, together
    "sinks": ("sinks",),
    "router": ("w_router", "b_router"),
    "experts": ("w_gate_up", "b_gate_up", "w_down", "b_down"),
    "attention": ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v", "w_o", "b_o"),
    "norms": ("attn_norm", "moe_norm", "final_norm"),
    "embed": ("embed",),
    "head": ("head",),
}
LAYERED = ("sinks", "router", "experts", "attention", "norms")  # those that every layer has


def stale_tensors(previous: Params) -> list[Hypothesis]:
    """A group of tensors, or everything, of the version before."""
    found = [
        replace(_stale(f"stale_{group}", names, None, previous), exclusive=group)
        for group, names in GROUPS.items()
    ]
    everything = tuple(name for names in GROUPS.values() for name in names)
    found.append(Hypothesis(
        "stale_everything", "weights", "the engine must hold the newest weights",
        "the weight sync: engine.load() must return before generate(); restart the engine",
        partial(_with_stale, previous=previous, names=everything, layer=None), "everything",
    ))  # fmt: skip
    return found


def stale_layers(previous: Params, cfg: ModelConfig) -> list[Hypothesis]:
    """One layer's tensors of the version before: each group that layers have, and all of them."""
    groups = {name: GROUPS[name] for name in LAYERED}
    groups["everything"] = tuple(name for names in groups.values() for name in names)
    return [
        _stale(f"stale_{group}_layer_{layer}", names, layer, previous)
        for layer in range(cfg.n_layers) for group, names in groups.items()
    ]  # fmt: skip


def _stale(name: str, names: tuple[str, ...], layer: int | None, previous: Params) -> Hypothesis:
    where = "every layer" if layer is None else f"layer {layer}"
    fix = (
        "the loading of these tensors in vLLM: install this jaxmoe in its environment again "
        "(pip install --no-deps), and sync with --set rollout.vllm.transport=files"
    )
    return Hypothesis(
        name, "weights" if layer is None else "layers",
        f"the engine must hold the newest {', '.join(names)} of {where}", fix,
        partial(_with_stale, previous=previous, names=names, layer=layer),
    )  # fmt: skip


def _with_stale(
    v: Variant, *, previous: Params, names: tuple[str, ...], layer: int | None
) -> Variant:
    def pick(path: tuple[Any, ...], new: Leaf, old: Leaf) -> Leaf:
        # a packed leaf is two arrays, whose attribute comes after the parameter's name
        keys = [str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey)]
        if keys[-1] not in names:
            return new
        if layer is None:
            return old
        if len(keys) == 1 or keys[1] != ("sliding", "full")[layer % 2]:
            return new
        return new.at[layer // 2].set(old[layer // 2])

    return replace(v, params=jax.tree_util.tree_map_with_path(pick, v.params, previous))
