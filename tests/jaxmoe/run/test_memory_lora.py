# SPDX-License-Identifier: Apache-2.0
"""The dry run of adapters beside a base in four bits, and of experts that take tokens in chunks."""

import math

import jax

from jaxmoe.config_file import load_config, override
from jaxmoe.model.lora import adapter_shapes
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import stage_shapes
from jaxmoe.run.memory import microbatch_rows, plan_memory

PACKED = override(load_config("gptoss20b.py"), "mesh.fsdp=8", "mesh.expert=1")
BIG = override(PACKED, "optim.tokens_per_microbatch=0", "optim.microbatches=128")


def size(specs):
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs))


def test_adapters_are_trained_over_a_four_bit_base():
    cfg = override(BIG, "mesh.fsdp=1", "lora.attention_rank=4", "lora.expert_rank=4")
    cfg, plain = override(cfg, "loss.kl_coef=0.1"), plan_memory(override(BIG, "mesh.fsdp=1"))
    entries, mem = size(adapter_shapes(cfg.model, cfg.lora)), plan_memory(cfg)
    assert mem.weights == mem.engine_copy == mem.update == 4 * entries
    assert mem.optimizer == 8 * entries and mem.reference == 0
    assert mem.packed == 24 * 32 * 3 * 2880**2 * 17 // 32 and mem.rows == mem.table == 0
    assert 13.7e9 < mem.packed + mem.frozen < 13.9e9
    assert plain.packed == plain.frozen == 0
    m, tokens = (
        cfg.model,
        microbatch_rows(cfg) * cfg.context,
    )  # of one layer of a pair no gradients beside the other's
    arrays = 4 * m.d_model + (2 * m.n_q_heads + 2 * m.n_kv_heads) * m.head_dim
    arrays = tokens * (2 * arrays + 4 * (m.n_q_heads + m.n_experts))
    assert plain.activations - mem.activations == arrays


def test_rows_of_experts_are_counted_by_chunk():
    m, tokens, chunk = BIG.model, BIG.context, 512
    unsplit, cut = (plan_memory(override(BIG, f"optim.expert_tokens={n}")) for n in (0, chunk))
    a_token = 2 * m.experts_per_token * (2 * m.d_model + 3 * m.d_expert)
    # values and gradients, of both layers of a pair
    assert unsplit.activations - cut.activations == 4 * (tokens - chunk) * a_token
    assert plan_memory(override(BIG, f"optim.expert_tokens={tokens}")) == unsplit
    plans = (
        plan_memory(override(BIG, "optim.remat=False", f"optim.expert_tokens={n}"))
        for n in (0, chunk)
    )
    unsplit, cut = plans  # a chunk's rows are made again, without optim.remat too
    rows = 2 * a_token
    assert unsplit.activations - cut.activations == rows * (m.n_layers * tokens - chunk)


def test_unsharded_training_and_host_memory_are_counted():
    cfg = override(BIG, "mesh.fsdp=1", "lora.attention_rank=4")
    table = cfg.model.padded_vocab * cfg.model.d_model
    plain, rows = plan_memory(cfg), plan_memory(override(cfg, "lora.embedding_rows=512"))
    assert rows.rows == 512 * cfg.model.d_model * 2 and rows.table == rows.host == 2 * table
    assert plain.training - rows.training == rows.table - rows.rows
    assert plain.sampling == rows.sampling
    unsplit = override(cfg, "lora.modules_to_save=router,head")
    (router, bias), layers = (cfg.model.d_model * 32, 32), cfg.model.n_layers
    extra = layers * (router + bias) + table
    mem = plan_memory(unsplit)
    assert mem.weights - plain.weights == 4 * extra
    assert mem.optimizer - plain.optimizer == 8 * extra
    assert mem.engine_copy - plain.engine_copy == 4 * layers * (router + bias) + 2 * table
    assert mem.frozen == plain.frozen  # they stay, as the reference
    state = stage_shapes(unsplit, make_optimizer(unsplit.optim, steps=1), rl_optimizer(unsplit))[
        "rl"
    ]
    assert mem.weights == sum(4 * x.size for x in jax.tree.leaves(state.params))
