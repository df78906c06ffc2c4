# SPDX-License-Identifier: Apache-2.0
"""Metrics of experts that are read in four bits: codes that a step changed, and saturated values.

A master that never crosses the border to another code teaches the model nothing, whatever its
gradient. Next: jaxmoe/model/rounded.py.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmoe.config.layer_plan import LayerPlan
from jaxmoe.model.rounded import MATRICES, round_experts
from jaxmoe.rl.metrics.router_metrics import LAYER_PREFIX
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import TrainState
from jaxmoe.shapes import Leaf, Metrics, Params
from pallas_kernels.grouped_matmul import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, mxfp4_to_dense
from pallas_kernels.grouped_matmul.rounded import is_saturated

SAMPLED_EXPERTS, SAMPLED_COLUMNS = 8, 16  # of each matrix, spread evenly


def measure_rounding(old: TrainState, new: TrainState, scorer: Scorer) -> Metrics:
    """Return `rounding_metrics` of a step; {} if weights are read as they are."""
    if scorer.round_params is None:
        return {}
    before, after = (scorer.pack_policy(s.params, s.frozen).packed for s in (old, new))
    masters = new.policy if scorer.place_masters is None else scorer.place_masters(new.policy)
    return rounding_metrics(before, after, masters, scorer.model.plan)


def rounding_metrics(before: Params, after: Params, masters: Params, plan: LayerPlan) -> Metrics:
    """Shares of all values of the experts' matrices, and their distance from the masters.

    quant/moved_frac: values that this step changed.
    quant/rescaled_frac: values of groups whose scale changed. If the largest value of a group falls
        a little below 4 · 2^e, the scale is halved, and that value becomes 3 · 2^e.
    quant/saturated_frac: masters above the largest value of their group; they get no gradient.
    quant/relative_error: ‖values − masters‖ / ‖masters‖, Frobenius.
    quant/distance: mean |value − master| / 2^e, with 2^e the scale of the group. Neighbouring codes
        are 0.5, 1 or 2 apart. It is 0 at the start from released weights.
    layers/quant_relative_error, layers/quant_moved_frac: arrays [L].

    before, after: packed weights (`round_experts`) around the step; masters: the weights after it.
    """
    groups = {
        group: _measure_group(before["layers"][group], layer, masters["layers"][group])
        for group, layer in after["layers"].items()
    }
    sums = {
        name: jnp.concatenate(
            [
                jnp.stack([groups[group.name][name] for group in block], axis=-1).reshape(-1)
                for block in plan.blocks
            ]
        )
        for name in groups[plan.blocks[0][0].name]
    }
    total = {name: jnp.sum(x_L) for name, x_L in sums.items()}
    return {
        "quant/moved_frac": total["moved"] / total["count"],
        "quant/rescaled_frac": total["rescaled"] / total["count"],
        "quant/saturated_frac": total["saturated"] / total["count"],
        "quant/relative_error": jnp.sqrt(total["error"] / total["norm"]),
        "quant/distance": total["distance"] / total["count"],
        LAYER_PREFIX + "quant_relative_error": jnp.sqrt(sums["error"] / sums["norm"]),
        LAYER_PREFIX + "quant_moved_frac": sums["moved"] / sums["count"],
    }


def _measure_group(old: Params, new: Params, masters: Params) -> dict[str, Array]:
    """Sums over both matrices of each layer of a group, arrays [L]."""
    sums: dict[str, Array] = {}
    for name in MATRICES:
        packed, master = new[name], masters[name].astype(jnp.float32)
        difference = mxfp4_to_dense(packed) - master
        scale = jnp.repeat(packed.scales_EDF, GROUP, axis=-2).astype(jnp.float32)
        parts = {
            "moved": is_changed(old[name], packed).astype(jnp.float32),
            "rescaled": GROUP * (old[name].scales_EDF != packed.scales_EDF).astype(jnp.float32),
            "saturated": is_saturated(master, packed.scales_EDF).astype(jnp.float32),
            "error": jnp.square(difference),
            "norm": jnp.square(master),
            "distance": jnp.abs(difference) * jnp.exp2(127 - scale),
        }
        n_layers, n_values = len(master), float(master[0].size)  # of 20B no int32 holds it
        sums["count"] = sums.get("count", 0.0) + jnp.full(n_layers, n_values)
        for key, x_LEDF in parts.items():
            sums[key] = sums.get(key, 0.0) + jnp.sum(x_LEDF, axis=(1, 2, 3))
    return sums


def is_changed(old: Mxfp4, new: Mxfp4) -> Bool[Array, "*E D F"]:
    """True for each value that differs; another sign of 0 or another scale alone is no change."""
    return mxfp4_to_dense(old) != mxfp4_to_dense(new)


def sample_codes(
    params: Params, round_params: Callable[[Params], Params] = round_experts
) -> dict[str, Leaf]:
    """Return the codes of a fixed sample of the experts' matrices, by name, to be compared later.

    The sample has at most SAMPLED_EXPERTS experts and SAMPLED_COLUMNS columns of each matrix, in
    all layers.
    """
    layers = {
        kind: {name: _take_sample(layer[name]) for name in MATRICES}
        for kind, layer in params["layers"].items()
    }
    packed = round_params({"layers": layers})["layers"]
    return {
        f"{kind}/{name}/{part}": x
        for kind, layer in packed.items()
        for name, matrix in layer.items()
        for part, x in zip(matrix._fields, matrix.codes, strict=False)
    }


def _take_sample(w_LEDF: Leaf) -> Leaf:
    _, n_experts, _, width = w_LEDF.shape
    # Rounded up, or 15 experts would all be taken.
    experts = slice(None, None, -(-n_experts // SAMPLED_EXPERTS))
    return w_LEDF[:, experts, :, :: -(-width // SAMPLED_COLUMNS)]


def moved_share(
    start: Mapping[str, Leaf],
    params: Params,
    round_params: Callable[[Params], Params] = round_experts,
) -> Array:
    """Return the share of the sampled values that differ from `sample_codes`."""
    changed: list[Array] = []
    new = sample_codes(params, round_params)
    for name in new:
        if name.endswith("/nibbles_EDF"):
            stem = name.removesuffix("nibbles_EDF")
            old_new = (Mxfp4(codes[name], codes[stem + "scales_EDF"]) for codes in (start, new))
            changed.append(is_changed(*old_new).reshape(-1))
    return jnp.mean(jnp.concatenate(changed), dtype=jnp.float32)
