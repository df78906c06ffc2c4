# SPDX-License-Identifier: Apache-2.0
"""Shapes and facts of a run's weights, with or without adapters and rounded experts.

No array is made here: jaxmoe/run/engine_weights.py makes what an engine loads, and
jaxmoe/rl/scorer.py what the trainer reads. Next: jaxmoe/model/lora.py and jaxmoe/model/rounded.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe.config import Config
from jaxmoe.model.lora import adapter_shapes, lora_specs
from jaxmoe.model.params import Spec, abstract_base, abstract_params, param_specs
from jaxmoe.shapes import Params


class Weights(NamedTuple):
    """The weights that a run trains, freezes and rounds, as trees of Spec."""

    trained: Params  # of the policy in RL's state: adapters, or all weights
    base: Params  # frozen, with experts in four bits; {} without adapters
    rounded: list[Spec]  # trained experts whose values a step reads in four bits
    dtype: jnp.dtype  # of `trained`
    packs_experts: bool  # an engine with the trainer's forward reads experts in four bits

    @property
    def are_read_as_trained(self) -> bool:
        """True if an engine reads nothing but the trained weights, unrounded."""
        return not (self.base or self.packs_experts)


def weights_of(cfg: Config) -> Weights:
    """Return the view of a config's weights."""
    specs = param_specs(cfg.model)
    if cfg.lora.ranks:
        # Adapters are float32, whatever optim.param_dtype is.
        return Weights(lora_specs(cfg.model, cfg.lora), specs, [], jnp.dtype("float32"), True)
    rounded = [x for x in jax.tree.leaves(specs) if x.is_packable and cfg.quant.trains_rounded]
    dtype = jnp.dtype(cfg.optim.param_dtype)
    return Weights(specs, {}, rounded, dtype, cfg.quant.experts != "none")


def trained_shapes(cfg: Config) -> Params:
    """Return the tree of jax.ShapeDtypeStruct of the weights that RL trains."""
    if cfg.lora.ranks:
        return adapter_shapes(cfg.model, cfg.lora)
    return abstract_params(cfg.model, cfg.optim.param_dtype)


def keeps_reference(cfg: Config) -> bool:
    """Return True if RL keeps a copy of the weights before it, for the KL or as the teacher.

    New adapters need none: their base is the reference.
    """
    is_read = cfg.loss.kl_coef > 0 or cfg.distill.teacher == "base"
    return is_read and not cfg.lora.starts_at_base


def expert_products(cfg: Config) -> tuple[str, ...]:
    """Return the products that may read the experts, by the ends of their names in the table
    pallas_kernels.bench.ops.OPS.

    A frozen base has four bits if its checkpoint has them, which is not known here.
    """
    if cfg.quant.experts != "none":
        return ("_rounded",) if cfg.quant.trains_rounded else ("", "_mxfp4")
    can_be_packed = cfg.model.d_model % 64 == 0 and cfg.model.d_expert % 64 == 0
    if cfg.lora.ranks and can_be_packed:
        return "", "_low_rank" if cfg.lora.expert_rank else "_mxfp4"
    return ("",)


def base_shapes(cfg: Config) -> Params | None:
    """Return the shapes of the frozen weights under adapters; None if all weights are trained."""
    return abstract_base(cfg.model) if cfg.lora.ranks else None
