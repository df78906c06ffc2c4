# SPDX-License-Identifier: Apache-2.0
"""The shapes that a step is compiled for are those that it is called with."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmoe.batches.batch import rollout_batch, shard_rows
from jaxmoe.batches.sharing_from_config import sharing_from_config
from jaxmoe.config_file import load_config, override
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.turns import add_turns
from jaxmoe.run.programs import batch_shapes, sharded_batch_shapes
from pallas_kernels import sink_attention

SMALL = (
    "rollout.sequences_per_step=16",
    "rollout.max_new_tokens=6",
    "data.max_prompt_tokens=7",
    "mesh.fsdp=4",
    "mesh.expert=2",
    "optim.share_prompts=off",
)


def called_with(cfg, a, sharing):
    """Batch and minibatches as train makes them."""
    m, r = cfg.model, cfg.rollout
    read = cfg.data.max_prompt_tokens + 2
    routed = np.broadcast_to(
        np.arange(m.experts_per_token), (read, m.n_layers, m.experts_per_token)
    )
    rollouts = [
        Rollout(
            Prompt(i // r.samples_per_prompt, "", (1,) * (read - 2), None),
            np.ones(3, np.int32),
            np.zeros(3, np.float32),
            StopReason.MAX_TOKENS,
            np.zeros(3, np.int32),
            routed_experts=routed,
            state_keys=("a",),
        )
        for i in range(r.sequences_per_step)
    ]
    batch = rollout_batch(
        rollouts,
        np.zeros(len(rollouts)),
        samples=r.samples_per_prompt,
        length=cfg.context,
        pad_id=0,
        n_experts=m.n_experts if cfg.router.replay == "R3" else None,
    )
    batch = add_turns(batch, rollouts, a, r.max_turns)
    batch = replace(batch, shared={"step": np.int32(0)})
    return split_minibatches(
        batch, a, seed=(0,), tokens_per_microbatch=cfg.optim.tokens_per_microbatch, sharing=sharing
    )


def shapes_of(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(x), np.dtype(x.dtype)) for x in leaves]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("optim.tokens_per_microbatch=104", "router.replay=R3"),
        ("loss.minibatches=2", "loss.epochs=3", "loss.old_logp=recomputed"),
        ("loss.minibatches=2", "loss.old_logp=recomputed", "optim.tokens_per_microbatch=104"),
        ("optim.share_prompts=on",),
        (
            "optim.share_prompts=on",
            "loss.minibatches=2",
            "loss.old_logp=recomputed",
            "optim.tokens_per_microbatch=104",
        ),
    ],
)
def test_planned_shapes_are_those_of_train(changes):
    check_shapes(override(load_config("tiny.py"), *SMALL, *changes))


def test_turns_are_not_cut_as_time_is():
    """Three turns over a sequence axis of four devices."""
    mesh = ("mesh.fsdp=2", "mesh.sequence=4", "optim.share_prompts=off")
    turns = ("loss.advantages=turn_return_advantages", "optim.tokens_per_microbatch=0")
    check_shapes(override(load_config("tiny_tool.py"), *mesh, *turns))


def check_shapes(cfg):
    a = algorithm_from_config(cfg)
    sharing = sharing_from_config(cfg, sink_attention)
    batch, minibatches = called_with(cfg, a, sharing)
    shapes = batch_shapes(cfg, a, sharing)
    assert shapes_of(shapes) == shapes_of((batch, minibatches))
    mesh = make_mesh(cfg.mesh)
    placed, _ = sharded_batch_shapes(*shapes, mesh)
    for x, y in zip(jax.tree.leaves(placed), jax.tree.leaves(shard_rows(batch, mesh)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
