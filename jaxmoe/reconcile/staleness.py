# SPDX-License-Identifier: Apache-2.0
"""Tensors of the previous version that an engine may still have, in every layer or in one.

Next: jaxmoe/reconcile/scalars.py, the fitted numbers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.variants import Hypothesis, Variant
from jaxmoe.shapes import Leaf, Params

GROUPS = {  # tensors that are loaded, or left out, together
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
    """Return hypotheses that a group of tensors, or every tensor, is of the previous version."""
    hypotheses = [
        replace(_stale_hypothesis(f"stale_{group}", names, None, previous), exclusive=group)
        for group, names in GROUPS.items()
    ]
    all_names = tuple(name for names in GROUPS.values() for name in names)
    hypotheses.append(
        Hypothesis(
            "stale_everything",
            "weights",
            "the engine must hold the newest weights",
            "check the weight sync (engine.load() must return before generate()); "
            "restart the engine",
            partial(_replace_tensors, previous=previous, names=all_names, layer=None),
            "everything",
        )
    )
    return hypotheses


def stale_layers(previous: Params, cfg: ModelConfig) -> list[Hypothesis]:
    """Return hypotheses that one layer's tensors are of the previous version, by group and all."""
    groups = {name: GROUPS[name] for name in LAYERED}
    groups["everything"] = tuple(name for names in groups.values() for name in names)
    return [
        _stale_hypothesis(
            f"stale_{group}_layer_{layer}", names, (layer, *cfg.plan.find_layer(layer)), previous
        )
        for layer in range(cfg.n_layers)
        for group, names in groups.items()
    ]


def _stale_hypothesis(
    name: str, names: tuple[str, ...], layer: tuple[int, str, int] | None, previous: Params
) -> Hypothesis:
    """`layer`: its number, group and index in the stack; None: every layer."""
    layers = "every layer" if layer is None else f"layer {layer[0]}"
    fix = (
        "vLLM must load these tensors: install this jaxmoe in its environment again "
        "(pip install --no-deps), and sync with --set rollout.vllm.transport=files"
    )
    return Hypothesis(
        name,
        "weights" if layer is None else "layers",
        f"the engine must hold the newest {', '.join(names)} of {layers}",
        fix,
        partial(_replace_tensors, previous=previous, names=names, layer=layer),
    )


def _replace_tensors(
    v: Variant, *, previous: Params, names: tuple[str, ...], layer: tuple[int, str, int] | None
) -> Variant:
    def pick_leaf(path: tuple[Any, ...], current: Leaf, old: Leaf) -> Leaf:
        # A packed leaf is two arrays; their attribute follows the parameter's name in the path.
        keys = [str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey)]
        if keys[-1] not in names:
            return current
        if layer is None:
            return old
        _, group, index = layer
        if len(keys) == 1 or keys[1] != group:
            return current
        # A run's engine may read experts in four bits, and its trainer unrounded ones in float32.
        return current.at[index].set(old[index].astype(current.dtype))

    return replace(v, params=jax.tree_util.tree_map_with_path(pick_leaf, v.params, previous))
