# SPDX-License-Identifier: Apache-2.0
"""Compute log-probs and values of a batch, for training and scoring.

Next: jaxmoe/model/forward.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from jaxmoe.batches.batch import Batch
from jaxmoe.config import ModelConfig, require
from jaxmoe.model import Ops, forward, sequence_logprobs, values_after
from jaxmoe.model.check_ops import check_recorded
from jaxmoe.model.head import (
    sequence_divergences,
    sequence_listed_divergences,
    shift_right,
)
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.params import block_specs
from jaxmoe.model.rounded import map_experts
from jaxmoe.model.trainable import merge_params
from jaxmoe.rl.state import Frozen, Trained
from jaxmoe.shapes import Params


@dataclass(frozen=True)
class Scorer:
    """Settings of the forward that do not change in a run: model, ops, sampling temperature."""

    model: ModelConfig
    ops: Ops
    temperature: float = 1.0
    critic: str = "none"  # "own" or "shared" backbone
    scales: Mapping[str, float] = field(default_factory=dict)  # of LoRA's adapters, by matrix
    # Experts that the policy's forward uses, as `router.replay`: "" its own, "R2"
    # batch.old_experts_BTLA, "R3" batch.routed_experts_BTLA.
    replay: str = ""
    # Rounds the policy's weights before they are read (jaxmoe.model.rounded.round_experts), or None
    round_params: Callable[[Params], Params] | None = None
    # Returns weights with the experts placed as their rounded values are; None: they are already
    place_masters: Callable[[Params], Params] | None = None
    teacher: "Scorer | None" = None  # of the teacher's model, at the same temperature

    def full_params(self, params: Trained, frozen: Frozen) -> Trained:
        """Return params with the policy that the forward takes: the trained parameters together
        with the frozen ones and the adapters' base."""
        policy = with_rounded(merge_params(params.policy, frozen.policy), frozen.packed)
        return replace(params, policy=with_adapters(frozen.base, policy, self.scales))

    def pack_policy(self, params: Trained, frozen: Frozen) -> Frozen:
        """Return the frozen parameters with the policy's values as they are read, once per update.

        They are unchanged if weights are not rounded.
        """
        if self.round_params is None:
            return frozen
        policy = lax.stop_gradient(merge_params(params.policy, frozen.policy))
        return replace(frozen, packed=self.round_params(policy))

    def full_reference(self, frozen: Frozen) -> Params:
        """Return the policy before RL; without a copy of it, that is the base of the adapters."""
        if frozen.reference is None:
            return frozen.base
        reference = self.full_params(Trained(frozen.reference), replace(frozen, packed=None)).policy
        return reference if self.round_params is None else self.round_params(reference)

    def full_teacher(self, frozen: Frozen) -> Params:
        """Return the teacher's weights; without a second model, those of the policy before RL."""
        return self.full_reference(frozen) if frozen.teacher is None else frozen.teacher

    def score_policy(
        self, params: Trained, batch: Batch, teacher: Params | None = None
    ) -> dict[str, Array]:
        """Return logp_BT and entropy_BT, `critic_values` of a critic that shares the layers, and
        the arrays that `ops.record` recorded, [B, T, L, …] (`recorded_rows`); of a teacher, or of
        words that it listed in the batch, also teacher_reverse_kl_BT and teacher_forward_kl_BT."""
        hidden_BTD, recorded = self.run_forward(params.policy, batch)
        rows = batch if batch.packed is None else batch.packed
        logp_BT, entropy_BT = sequence_logprobs(
            params.policy,
            hidden_BTD,
            rows.tokens_BT,
            self.model,
            self.ops,
            temperature=self.temperature,
        )
        out = {"logp_BT": unpack_rows(logp_BT, batch), "entropy_BT": unpack_rows(entropy_BT, batch)}
        if self.critic == "shared":
            out |= critic_values(params, hidden_BTD, batch)
        if teacher is not None or rows.teacher_top_ids_BTK is not None:
            out |= self.score_divergences(params.policy, hidden_BTD, teacher, batch)
        return out | {name: unpack_rows(x, batch) for name, x in recorded_rows(recorded).items()}

    def score_divergences(
        self,
        policy: Params,
        hidden_BTD: Float[Array, "_ _ D"],
        teacher: Params | None,
        batch: Batch,
    ) -> dict[str, Array]:
        """Return the divergences between the policy and the teacher, which has no gradient."""
        names = "teacher_reverse_kl_BT", "teacher_forward_kl_BT"
        rows = batch if batch.packed is None else batch.packed
        if teacher is None:
            compare: Callable[..., Any] = sequence_listed_divergences
            of_teacher: Any = rows.teacher_top_ids_BTK, rows.teacher_top_logp_BTK
        else:
            assert self.teacher is not None
            teacher = lax.stop_gradient(teacher)
            # The same rows, so that packing and shared prompts are the teacher's too.
            teacher_hidden_BTU, _ = self.teacher.run_forward(teacher, batch)
            compare, of_teacher = sequence_divergences, (teacher, teacher_hidden_BTU)
        divergences = compare(
            policy, hidden_BTD, *of_teacher, self.model, self.ops, temperature=self.temperature
        )
        return {n: unpack_rows(x, batch) for n, x in zip(names, divergences, strict=True)}

    def score_reference(self, reference: Params, batch: Batch) -> Float[Array, "B T"]:
        """Return ref_logp_BT of frozen parameters, which choose their own experts."""
        plain = replace(self, critic="none", replay="")
        return plain.score_policy(Trained(reference), batch)["logp_BT"]

    def score_values(self, params: Trained, batch: Batch) -> dict[str, Array]:
        """Return `critic_values` of a critic with its own backbone and its own routing."""
        assert params.critic is not None
        hidden_BTD, _ = replace(self, replay="").run_forward(params.critic["backbone"], batch)
        return critic_values(params, hidden_BTD, batch)

    def recorded_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return `find_recorded_sizes` of the arrays that `score_policy` returns."""
        return find_recorded_sizes(self.ops.record, self.model)

    def run_forward(
        self, params: Params, batch: Batch
    ) -> tuple[Float[Array, "_ _ D"], dict[str, Array]]:
        """Return the last hidden states of a batch, or of a microbatch's packed rows, and the
        arrays that `ops.record` recorded, with a first axis of layers."""
        rows = batch if batch.packed is None else batch.packed
        hidden_BTD, _, recorded = forward(
            params,
            rows.tokens_BT,
            self.model,
            self.ops,
            positions_BT=rows.positions_BT,
            segment_ids_BT=rows.segment_ids_BT,
            last_segment_ids_BT=None if batch.packed is None else batch.packed.last_segment_ids_BT,
            routed_experts_BTLA=self.select_replayed(rows),
            step=batch.shared.get("step"),
        )
        return hidden_BTD, recorded

    def select_replayed(self, rows: Any) -> Integer[Array, "_ _ L A"] | None:
        """Return the experts that a forward of these rows is to use; None for its own."""
        replayed = {"": None, "R2": rows.old_experts_BTLA, "R3": rows.routed_experts_BTLA}
        return replayed[self.replay]


def with_rounded(params: Params, packed: Params | None) -> Params:
    """Return the parameters that the trainer's forward reads: packed values, masters' gradients.

    Without packed values they are read as they are.
    """
    if packed is None:
        return params
    return map_experts(lambda master, values: values._replace(master_EDF=master), params, packed)


def recorded_rows(recorded: Mapping[str, Array]) -> dict[str, Array]:
    """Convert what a forward recorded, {name_BT…: [L, B, T, …]}, to {name_BTL…: [B, T, L, …]}.

    Raises ConfigError for a name or a shape without the axes B and T.
    """
    rows = {}
    for name, x_LBT in recorded.items():
        stem, _, axes = name.rpartition("_")
        require(
            bool(stem) and axes.startswith("BT") and x_LBT.ndim == 1 + len(axes),
            f"ops.record must return arrays [B, T, …] by names that end in their axes, such as "
            f"logits_BTE; got {name} of shape {x_LBT.shape[1:]}.",
        )
        rows[f"{stem}_BTL{axes[2:]}"] = jnp.moveaxis(x_LBT, 0, 2)
    return rows


def find_recorded_sizes(record: Callable[..., Any], m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the sizes after [B, T] of the arrays that `Ops.record` gives to the loss, by name."""
    # B and T differ, so that a function which swaps the two axes is refused.
    B, T = 2, 3
    layer = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in block_specs(m).items()
    }

    def record_layers(layer: Params) -> dict[str, Array]:
        h_BTD = jnp.zeros((B, T, m.d_model), m.dtype)
        routing_BTA = jnp.zeros((B, T, m.experts_per_token))
        recorded = record(h_BTD, layer, routing_BTA.astype(jnp.int32), routing_BTA)
        check_recorded(recorded, h_BTD, record)
        stacked = {name: jnp.stack(m.n_layers * [x]) for name, x in recorded.items()}
        return recorded_rows(stacked)

    # eval_shape traces without allocating or computing, so this costs the same at any model size.
    return {name: x.shape[2:] for name, x in jax.eval_shape(record_layers, layer).items()}


def critic_values(
    params: Trained, hidden_BTD: Float[Array, "_ _ D"], batch: Batch
) -> dict[str, Array]:
    """Return values_BT of the state before each token, and values_after_BT of the one after it."""
    assert params.critic is not None
    after_BT = unpack_rows(values_after(params.critic, hidden_BTD), batch)
    return {"values_BT": shift_right(after_BT), "values_after_BT": after_BT}


def unpack_rows(x_BT: Shaped[Array, "_ _ *rest"], batch: Batch) -> Shaped[Array, "B T *rest"]:
    """Convert values of the model's rows to [B, T], where a row is one sequence."""
    if batch.packed is None:
        return x_BT
    return x_BT.reshape(-1, *x_BT.shape[2:])[batch.packed.token_index_BT]
