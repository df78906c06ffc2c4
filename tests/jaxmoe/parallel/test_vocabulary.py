# SPDX-License-Identifier: Apache-2.0
"""Embedding and head over eight devices against the plain ones, and what a device has of them."""

import math
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig
from jaxmoe.model import layers
from jaxmoe.model.ops import plain_ops, with_kernels
from jaxmoe.parallel import vocabulary
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import AXES, SAMPLING, TRAINING, make_mesh, mesh_spec, partition_axes
from pallas_kernels.token_logprobs import token_logprobs
from tests.jaxmoe.small_models import SEVEN_EXPERTS
from tests.pallas_kernels.three_way import three_way

B, T, D, V = 8, 6, 24, 2400
CFG = replace(SEVEN_EXPERTS, vocab_size=V - 5, vocab_multiple=100, d_model=D)
TEMPERATURE = 0.7
FSDP = MeshConfig(fsdp=8)
EXPERT = MeshConfig(fsdp=2, expert=2, tensor=2)
SEQUENCE = MeshConfig(fsdp=2, sequence=2, tensor=2)
BETWEEN = MeshConfig(fsdp=2, expert=2, sequence=2)
MESHES = [FSDP, EXPERT, SEQUENCE]
NAMES = ("logp", "entropy", "dhidden", "dhead")


def name_mesh(mesh):
    sizes = {name: getattr(mesh, name) for name in AXES}
    return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def replica_axes(mesh, names):
    return tuple(n for n in AXES if mesh.shape[n] > 1 and n not in names)


def head_axes(mesh):
    return partition_axes((None, "vocab"), (D, V), mesh.shape)[1]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 128, 128 and 44 columns of each of eight pieces."""
    monkeypatch.setattr(vocabulary, "MAX_CHUNK_ELEMENTS", D * 8 * vocabulary.ALIGN_COLUMNS)


def draw_arrays(dtype=jnp.float32):
    """Logits of deviation 2, and targets that meet borders of pieces and of chunks."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
    head = 2 * D**-0.5 * jax.random.normal(keys[1], (D, V))
    targets = jax.random.randint(keys[2], (B, T), 0, 2040, jnp.int32)
    edges = jnp.asarray((0, 127, 128, 255, 256, 299, 300, 427, 599, 600, 1499, 2039), jnp.int32)
    return hidden, head, targets.at[:2].set(edges.reshape(2, T))


def draw_cotangents():
    """0 for a row's last token, which has no target."""
    return jax.random.normal(jax.random.key(9), (2, B, T)).at[:, :, -1].set(0.0)


def values_and_gradients(f, hidden, head, targets):
    def weighted_sum(hidden, head):
        values = f(hidden, head, targets, temperature=jnp.float32(TEMPERATURE))
        weighed = jnp.where(
            jnp.isnan(jnp.stack(values)), 0.0, draw_cotangents() * jnp.stack(values)
        )
        return weighed.sum(), values

    (_, values), gradients = jax.value_and_grad(weighted_sum, (0, 1), has_aux=True)(hidden, head)
    return *values, *gradients


def run_streamed(mesh, tokens, axes, vocab_size, **options):
    """Over the mesh, from hidden, head, targets and temperature to logp and entropy; and how the
    first three lie."""

    def run_shard(hidden, head, targets, temperature):
        return vocabulary.target_logprobs_sharded(
            hidden,
            head,
            targets,
            temperature=temperature,
            vocab_size=vocab_size,
            axes=axes,
            impl="xla",
            **options,
        )

    specs = tokens, mesh_spec((), axes), tokens
    run_ops = jax.shard_map(
        run_shard, mesh=mesh, in_specs=(*specs, P()), out_specs=(tokens, tokens), check_vma=False
    )
    return run_ops, specs


@cache
def on_mesh(config, vocab_size, dtype="float32"):
    mesh, tokens = make_mesh(config), P(TRAINING.rows, TRAINING.time)
    run_ops, _ = run_streamed(
        mesh,
        tokens,
        head_axes(mesh),
        vocab_size,
        sequence_axis="sequence",
        copies=replica_axes(mesh, (*TRAINING.rows, *TRAINING.time)),
    )
    f = partial(values_and_gradients, lambda *x, temperature: run_ops(*x, temperature))
    return jax.jit(f)(*draw_arrays(jnp.dtype(dtype)))


@cache
def on_one(vocab_size, dtype="float32"):
    f = partial(layers.target_logprobs, vocab_size=vocab_size)
    return jax.jit(partial(values_and_gradients, f))(*draw_arrays(jnp.dtype(dtype)))


@cache
def oracle_logprobs(vocab_size, dtype="float32"):
    """Compute in float64 by the written-out derivative; the head is read in the model's dtype."""
    hidden, head, targets = draw_arrays(jnp.dtype(dtype))
    head = head.astype(hidden.dtype)[:, :vocab_size]
    hidden, head, ct = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (hidden, head, draw_cotangents())
    )
    dlogp, dent = ct
    z = hidden @ head / float(np.float32(TEMPERATURE))
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    p, spec = np.exp(log_p), np.asarray(targets)[..., None]
    entropy = -(p * log_p).sum(-1)
    dz = -p * (dlogp[..., None] + dent[..., None] * (log_p + entropy[..., None]))
    np.put_along_axis(dz, spec, np.take_along_axis(dz, spec, -1) + dlogp[..., None], -1)
    dz /= float(np.float32(TEMPERATURE))
    dhead = np.zeros((D, V))
    dhead[:, :vocab_size] = np.einsum("btd,btv->dv", hidden, dz)
    logp = np.take_along_axis(log_p, spec, -1)[..., 0]
    logp[:, -1] = entropy[:, -1] = np.nan
    return logp, entropy, dz @ head.T, dhead


CASES = [
    (FSDP, V - 5, "float32"),
    (FSDP, V - 100, "float32"),  # more than a chunk's 44 columns of a piece
    (FSDP, V - 350, "float32"),  # more than a piece
    (FSDP, V - 5, "bfloat16"),
    (EXPERT, V - 5, "float32"),
    (SEQUENCE, V - 5, "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, vocab_size, dtype", CASES, ids=[f"{name_mesh(c)}-{v}-{d}" for c, v, d in CASES]
)
def test_a_streamed_head_is_as_good_as_unsharded(config, vocab_size, dtype):
    actual, plain = on_mesh(config, vocab_size, dtype), on_one(vocab_size, dtype)
    assert [x.dtype for x in actual] == [jnp.float32, jnp.float32, dtype, jnp.float32]
    for name, value, simple, exact in zip(
        NAMES, actual, plain, oracle_logprobs(vocab_size, dtype), strict=True
    ):
        three_way(value, simple, exact, f"{name_mesh(config)} {vocab_size} {name}")
    assert not np.any(actual[3][:, vocab_size:])
    assert np.array_equal(np.isnan(actual[0]), np.broadcast_to(np.arange(T) == T - 1, (B, T)))


@pytest.mark.parametrize("config", [*MESHES, BETWEEN], ids=name_mesh)
def test_a_width_sharded_embedding_is_bitwise_equal(config):
    mesh = make_mesh(config)
    w = jax.random.normal(jax.random.key(1), (97, D))
    tokens = jax.random.randint(jax.random.key(2), (B, T), 0, 11, jnp.int32)  # most of them twice
    # of whole numbers: their sums are the same in any order
    ct = jax.random.randint(jax.random.key(3), (B, T, D), -9, 9).astype(jnp.bfloat16)
    axes = partition_axes((None, "width"), w.shape, mesh.shape)[1]
    assert len(axes) == (1 if config is FSDP else 3 if config is BETWEEN else 2)
    spec = P(TRAINING.rows, TRAINING.time)
    cut = jax.shard_map(
        partial(vocabulary.embed_sharded, dtype="bfloat16", axes=axes),
        mesh=mesh,
        in_specs=(spec, mesh_spec((), axes)),
        out_specs=spec,
        check_vma=False,
    )

    @partial(jax.jit, static_argnums=0)
    def run_ops(f, w):
        values, pull = jax.vjp(lambda w: f(tokens, w), w)
        return values, *pull(ct)

    for actual, plain in zip(
        run_ops(cut, w), run_ops(partial(layers.embed_tokens, dtype="bfloat16"), w), strict=True
    ):
        assert actual.dtype == plain.dtype
        np.testing.assert_array_equal(actual, plain)


@pytest.mark.parametrize("config", [*MESHES, BETWEEN], ids=name_mesh)
def test_logits_of_a_sharded_head_are_the_unshardeds(config):
    """Rows are not cut by sequence and tensor, wherever these stand among what cuts the head."""
    mesh = make_mesh(config)
    hidden, head, _ = draw_arrays()
    rows = P(TRAINING.rows)
    axes = head_axes(mesh)
    run_ops = jax.shard_map(
        partial(
            vocabulary.head_logits_sharded, axes=axes, copies=replica_axes(mesh, TRAINING.rows)
        ),
        mesh=mesh,
        in_specs=(rows, mesh_spec((), axes)),
        out_specs=rows,
        check_vma=False,
    )
    rows_BD = hidden[:, 0]
    actual, plain = jax.jit(run_ops)(rows_BD, head), layers.head_logits(rows_BD, head)
    three_way(
        actual, plain, np.asarray(rows_BD, np.float64) @ np.asarray(head, np.float64), "logits"
    )


@pytest.mark.parametrize("pieces", [1, 2, 8, 64, 512])
def test_chunks_are_even_few_and_cover_every_word(monkeypatch, pieces):
    monkeypatch.undo()  # the size as it is
    width, columns, words = 2880, 201_216 // pieces, 201_088  # GPT-OSS
    chunks = vocabulary.head_chunks(width, columns, pieces, words)
    sizes = [chunk.size for chunk in chunks]
    max_columns = vocabulary.MAX_CHUNK_ELEMENTS // (width * pieces)
    assert max(sizes) <= max(max_columns, vocabulary.ALIGN_COLUMNS) and len(set(sizes[:-1])) <= 1
    assert (len(chunks) - 1) * (
        max(max_columns, vocabulary.ALIGN_COLUMNS) - vocabulary.ALIGN_COLUMNS
    ) < columns
    assert np.cumsum([0, *sizes[:-1]]).tolist() == [chunk.first for chunk in chunks]
    assert sum(sizes) == columns and sum(chunk.words for chunk in chunks) == words


def test_chunks_without_words_are_left_out():
    """Shards have 300 columns; the last two and half of the third last are padding."""
    chunks = vocabulary.head_chunks(D, 300, 8, 1650)
    assert [tuple(chunk) for chunk in chunks] == [
        (0, 128, 6 * 128),
        (128, 128, 5 * 128 + 22),
        (256, 44, 5 * 44),
    ]
    assert [tuple(chunk) for chunk in vocabulary.head_chunks(D, 300, 8, 100)] == [(0, 128, 100)]


def test_eight_devices_need_an_eighth_of_memory(monkeypatch):
    """Compiled temporaries of values and gradients at GPT-OSS' sizes, 65,536 tokens."""
    monkeypatch.undo()
    tokens, width, columns, words = 8192, 2880, 201_216, 201_088
    # of one axis: XLA for CPUs would copy what it reduces over axes of one device
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def compile_fn(f, shardings):
        shapes = (
            ((8, tokens, width), "bfloat16"),
            ((width, columns), "float32"),
            ((8, tokens), "int32"),
        )

        def weighted_sum(*args):
            return sum(jnp.where(jnp.isnan(x), 0.0, x).sum() for x in f(*args))

        run_ops = jax.jit(jax.grad(weighted_sum, (0, 1)), out_shardings=shardings and shardings[:2])
        return run_ops.lower(
            *(
                jax.ShapeDtypeStruct(shape, dtype, sharding=spec)
                for (shape, dtype), spec in zip(shapes, shardings or (None,) * 3, strict=True)
            )
        ).compile()

    run_ops, specs = run_streamed(mesh, P("fsdp"), ("fsdp",), words)
    actual = compile_fn(
        lambda *args: run_ops(*args, jnp.float32(1.0)),
        tuple(NamedSharding(mesh, spec) for spec in specs),
    )
    plain = compile_fn(partial(layers.target_logprobs, temperature=1.0, vocab_size=words), None)
    temporary = [x.memory_analysis().temp_size_in_bytes for x in (actual, plain)]
    assert temporary[0] <= 0.16 * temporary[1], temporary
    collectives = re.findall(
        r" = (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(",
        actual.as_text(),
    )
    sizes = [
        math.prod(map(int, dims.split(",")))
        for result in collectives
        for dims in re.findall(r"\w\[([\d,]+)\]", result)
    ]
    assert sizes and max(sizes) <= width * columns // 8


def test_the_kernel_named_by_the_user_is_streamed():
    assert vocabulary.logprobs_impl(layers.target_logprobs) == "auto"
    named = with_kernels(plain_ops(), {"token_logprobs": ("mosaic_gpu", "xla")})
    assert vocabulary.logprobs_impl(named.logprobs) == ("mosaic_gpu", "xla")


def test_a_custom_log_prob_has_no_known_implementation():
    assert vocabulary.logprobs_impl(lambda *_, **__: None) is None
    custom = partial(layers.target_logprobs, per_token=lambda *_, **__: None)
    assert vocabulary.logprobs_impl(custom) is None
    warmer = partial(layers.target_logprobs, per_token=partial(token_logprobs, temperature=2.0))
    assert vocabulary.logprobs_impl(warmer) is None


@pytest.mark.parametrize("rules", [TRAINING, SAMPLING], ids=["training", "sampling"])
def test_only_the_runs_pieces_stream_the_head(rules):
    mesh, (hidden, head, targets) = make_mesh(EXPERT), draw_arrays()
    w = jax.random.normal(jax.random.key(1), (V, D))
    plain = plain_ops()
    custom_ops = replace(
        plain, logprobs=lambda *args, **arguments: plain.logprobs(*args, **arguments)
    )

    def run_ops(ops, hidden, head, targets, w):
        logprobs = ops.logprobs(hidden, head, targets, temperature=0.7, vocab_size=V - 5)
        logits = ops.logits(hidden[:, 0], head)
        return *(x[:, :-1] for x in logprobs), logits, ops.embed(targets, w, "float32")

    arguments = hidden, head, targets, w
    expected = jax.jit(partial(run_ops, plain))(*arguments)
    for ops, is_full in ((plain, False), (custom_ops, True)):
        lowered = jax.jit(partial(run_ops, sharded_ops(ops, mesh, CFG, rules))).lower(*arguments)
        assert is_full == (
            f"tensor<{D}x{V}xf32>"
            in "".join(line for line in lowered.as_text().splitlines() if "all_gather" in line)
        )
        for value, expected_value in zip(lowered.compile()(*arguments), expected, strict=True):
            np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-5)
