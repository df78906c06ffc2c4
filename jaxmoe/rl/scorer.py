# SPDX-License-Identifier: Apache-2.0
"""Parameters and a batch become log-probs and values, for whatever trains or scores.

Next: jaxmoe/model/forward.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxmoe.config import ModelConfig
from jaxmoe.model import Ops, forward, sequence_logprobs, values_after
from jaxmoe.model.head import shift_right
from jaxmoe.model.lora import with_adapters
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.state import Frozen, Trained
from jaxmoe.shapes import Leaf, Params


@dataclass(frozen=True)
class Scorer:
    """What does not change during a run: the model, how it runs, and the sampling temperature."""

    model: ModelConfig
    ops: Ops
    temperature: float = 1.0
    critic: str = "none"  # "own" or "shared" backbone
    scales: Mapping[str, float] = field(default_factory=dict)  # of LoRA's changes, by matrix
    replay_experts: bool = (
        True  # experts of a batch are the routers'; else they are compared with ours
    )

    def full_params(self, params: Trained, frozen: Frozen) -> Trained:
        """With the policy as the forward reads it: where adapters are trained, beside the base."""
        if frozen.base is None:
            return params
        return replace(params, policy=with_adapters(frozen.base, params.policy, self.scales))

    def score_policy(self, params: Trained, batch: Batch) -> dict[str, Array]:
        """logp_BT and entropy_BT; and `values_of` where the critic shares the policy's layers.

        Where the batch has experts that are not replayed, our own too: experts_BTLA.
        """
        if batch.routed_experts_BTLA is None or self.replay_experts:
            hidden_BTD, experts_LBTA = self.hidden_states(params.policy, batch), None
        else:
            hidden_BTD, experts_LBTA = self.run_forward(params.policy, batch)
        rows = batch if batch.packed is None else batch.packed
        logp_BT, entropy_BT = sequence_logprobs(
            params.policy, hidden_BTD, rows.tokens_BT, self.model, self.ops,
            temperature=self.temperature,
        )  # fmt: skip
        out = {"logp_BT": unpack_rows(logp_BT, batch), "entropy_BT": unpack_rows(entropy_BT, batch)}
        if self.critic == "shared":
            out |= critic_values(params, hidden_BTD, batch)
        if experts_LBTA is not None:
            out["experts_BTLA"] = unpack_rows(jnp.moveaxis(experts_LBTA, 0, 2), batch)
        return out

    def score_reference(self, reference: Params, batch: Batch) -> Float[Array, "B T"]:
        """ref_logp_BT of frozen parameters, which route by themselves."""
        plain = replace(self, critic="none")
        return plain.score_policy(Trained(reference), drop_routed_experts(batch))["logp_BT"]

    def score_values(self, params: Trained, batch: Batch) -> dict[str, Array]:
        """`values_of` a critic with a backbone of its own, which routes by itself."""
        assert params.critic is not None
        hidden_BTD = self.hidden_states(params.critic["backbone"], drop_routed_experts(batch))
        return critic_values(params, hidden_BTD, batch)

    def hidden_states(self, params: Params, batch: Batch) -> Float[Array, "_ _ D"]:
        """The last hidden states over a batch, or over the packed rows of a microbatch."""
        return self.run_forward(params, batch)[0]

    def run_forward(self, params: Params, batch: Batch) -> tuple[Float[Array, "_ _ D"], Leaf]:
        """`hidden`, and what `ops.record` kept."""
        rows = batch if batch.packed is None else batch.packed
        hidden_BTD, _, kept = forward(
            params, rows.tokens_BT, self.model, self.ops, positions_BT=rows.positions_BT,
            segment_ids_BT=rows.segment_ids_BT,
            routed_experts_BTLA=rows.routed_experts_BTLA if self.replay_experts else None,
        )  # fmt: skip
        return hidden_BTD, kept


def critic_values(
    params: Trained, hidden_BTD: Float[Array, "_ _ D"], batch: Batch
) -> dict[str, Array]:
    """values_BT before each token, values_after_BT once it is known."""
    assert params.critic is not None
    after_BT = unpack_rows(values_after(params.critic, hidden_BTD), batch)
    return {"values_BT": shift_right(after_BT), "values_after_BT": after_BT}


def unpack_rows(x_BT: Shaped[Array, "_ _ *rest"], batch: Batch) -> Shaped[Array, "B T *rest"]:
    """Values of the model's rows as the batch's: one row, one sequence."""
    if batch.packed is None:
        return x_BT
    return x_BT.reshape(-1, *x_BT.shape[2:])[batch.packed.token_index_BT]


def drop_routed_experts(batch: Batch) -> Batch:
    """Without the engine's experts: those are the policy's, not another model's."""
    packed = batch.packed and replace(batch.packed, routed_experts_BTLA=None)
    return replace(batch, routed_experts_BTLA=None, packed=packed)
