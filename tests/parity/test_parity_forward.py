# SPDX-License-Identifier: Apache-2.0
"""Our forward and every gradient against `transformers`, and mistakes that must be seen.

Three ways: |ours − oracle| ≤ 2·|theirs − oracle| + 2 ulp, where theirs has our dtype and the
oracle is their model in float64. A tensor's largest deviation counts. One run of theirs is one
draw of the rounding: their three implementations of the experts differ among themselves by up
to 3.6 in it. So theirs is the worst of the three, and of the same tensor's layers, in proportion.
"""

import copy
import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import iter_hf, load_params
from jaxmoe.model import forward, next_token_logits, plain_ops, sequence_logprobs
from jaxmoe.model.config import from_hf
from jaxmoe.model.moe.router import route_top_k
from jaxmoe.model.ops import invariant_ops
from jaxmoe.model.rope import yarn_frequencies

pytestmark = pytest.mark.parity

OPS = plain_ops()
NUMERICS = {"fast": OPS, "invariant": invariant_ops(OPS)}
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and batch, and what `transformers` makes of it."""

    model: object
    cfg: object
    params: object
    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    weights_BT: np.ndarray
    oracle: tuple


@pytest.fixture(scope="module")
def make_case(hugging, tmp_path_factory):
    """make_case(batch, time, first position, **config) -> Case; made once each."""
    cases_made = {}

    def make_case(batch: int, time: int, first: int, **config) -> Case:
        key = (batch, time, first, *sorted(config.items()))
        if key not in cases_made:
            kinds = config.pop("kinds", "sf")
            names = {"s": "sliding_attention", "f": "full_attention"}
            n_layers = config.get("num_hidden_layers", 4)
            types = [names[kinds[i % len(kinds)]] for i in range(n_layers)]
            model = hugging.model(layer_types=types, **config)
            directory = tmp_path_factory.mktemp("model")
            model.save_pretrained(directory)
            cfg = dataclasses.replace(from_hf(model.config.to_dict()), dtype="float32")
            rng = np.random.default_rng(1)
            tokens = rng.integers(0, cfg.vocab_size, (batch, time))
            positions = np.broadcast_to(first + np.arange(time), (batch, time))
            weights = rng.standard_normal((batch, time)).astype(np.float32)
            weights[:, 0] = 0
            params = load_params(directory, cfg, "float32")
            oracle = hugging.run(hugging.oracle(model), tokens, positions, weights)
            cases_made[key] = Case(model, cfg, params, tokens, positions, weights, oracle)
        return cases_made[key]

    return make_case


def run_jax(case: Case, dtype: str, ops):
    """(logits [B, T, V], experts [L, B, T, A] sorted, {checkpoint name: gradient})."""
    cfg = dataclasses.replace(case.cfg, dtype=dtype)
    tokens_BT = jnp.asarray(case.tokens_BT, jnp.int32)
    positions_BT = jnp.asarray(case.positions_BT, jnp.int32)

    def sum_loss(params):
        hidden_BTD, _, recorded = forward(params, tokens_BT, cfg, ops, positions_BT=positions_BT)
        logp_BT, _ = sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)
        return jnp.sum(jnp.asarray(case.weights_BT) * logp_BT), (
            hidden_BTD,
            recorded["experts_BTA"],
        )

    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.dtype(dtype)), case.params)
    (_, (hidden_BTD, chosen)), grads = jax.jit(jax.value_and_grad(sum_loss, has_aux=True))(params)
    assert hidden_BTD.dtype == jnp.dtype(dtype)
    logits = next_token_logits(params, hidden_BTD.reshape(-1, cfg.d_model), cfg, ops, 1.0)
    by_name = {name: g.astype(np.float64) for name, g in iter_hf(grads, cfg, "float32")}
    logits = np.asarray(logits, np.float64).reshape(*case.tokens_BT.shape, -1)
    return logits, np.sort(np.asarray(chosen)), by_name


def our_logits(case: Case, params=None, router=route_top_k, **changes):
    """Float32 logits of a changed config, changed parameters or another router."""
    cfg = dataclasses.replace(case.cfg, **changes)
    params = jax.tree.map(jnp.asarray, case.params if params is None else params)
    tokens_BT = jnp.asarray(case.tokens_BT, jnp.int32)
    positions_BT = jnp.asarray(case.positions_BT, jnp.int32)

    def logits(params):
        hidden_BTD, _, _ = forward(
            params,
            tokens_BT,
            cfg,
            dataclasses.replace(OPS, router=router),
            positions_BT=positions_BT,
        )
        return next_token_logits(params, hidden_BTD.reshape(-1, cfg.d_model), cfg, OPS, 1.0)

    return np.asarray(jax.jit(logits)(params), np.float64).reshape(*case.tokens_BT.shape, -1)


def check_deviation(
    name: str, actual, naives, oracle, dtype: str, floor: float = 0
) -> tuple[float, str]:
    """(our largest deviation over the allowed one, a line that says where it is)."""
    error, size = np.abs(actual - oracle), np.abs(oracle).max()
    worst = np.unravel_index(error.argmax(), error.shape)
    limit = max(floor, *(relative_error(naive, oracle) for naive in naives)) * size
    allowed = 2 * limit + 2 * EPS[dtype] * size
    worst_index = ", ".join(str(int(i)) for i in worst)
    return error.max() / allowed, (
        f"{name}[{worst_index}]: ours {actual[worst]:.9g}, oracle {oracle[worst]:.9g}, "
        f"|difference| {error.max():.3g}, theirs {limit:.3g}, allowed {allowed:.3g}"
    )


def relative_error(x: np.ndarray, oracle: np.ndarray) -> float:
    return np.abs(x - oracle).max() / np.abs(oracle).max()


def run_hf(case: Case, hugging, dtype: str, weights_BT=None) -> list[tuple]:
    """Return the results of their three implementations of the experts in one dtype."""
    results = []
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model = copy.deepcopy(case.model).to(getattr(hugging.torch, dtype))
        model.config._experts_implementation = implementation
        results.append(hugging.run(model, case.tokens_BT, case.positions_BT, weights_BT))
    return results


def worst_of_the_layers(naives: list[tuple], oracle: dict) -> dict[str, float]:
    """Tensor without its layer number -> their largest relative deviation in any layer."""
    worst: dict[str, float] = {}
    for name, want in oracle.items():
        kind = without_layer(name)
        worst[kind] = max(worst.get(kind, 0), *(relative_error(n[2][name], want) for n in naives))
    return worst


def without_layer(name: str) -> str:
    return re.sub(r"layers\.\d+", "layers", name)


COMBINATIONS = [
    ("long", "float32", "fast"),
    ("long", "bfloat16", "invariant"),
    ("far", "bfloat16", "fast"),
    ("far", "float32", "invariant"),
    ("three", "float32", "fast"),
]
CASES = {
    "long": dict(batch=1, time=160, first=0, sliding_window=128),
    "far": dict(batch=2, time=45, first=5000, sliding_window=9),
    # Period three, and two layers after the last complete period.
    "three": dict(batch=2, time=45, first=0, sliding_window=9, num_hidden_layers=5, kinds="ssf"),
}


@pytest.mark.parametrize(
    "name, dtype, numerics",
    [
        pytest.param(*case, marks=() if case in COMBINATIONS else pytest.mark.extended)
        for case in itertools.product(CASES, ("float32", "bfloat16"), NUMERICS)
    ],
)
def test_logits_and_every_gradient_agree_with_transformers(
    make_case, hugging, name, dtype, numerics
):
    case = make_case(**CASES[name])
    naives = run_hf(case, hugging, dtype, case.weights_BT)
    actual = run_jax(case, dtype, NUMERICS[numerics])
    logits, chosen, want = case.oracle
    # a flipped expert is no rounding error; the models are made so that none flips
    assert all((naive[1] == chosen).all() for naive in naives) and (actual[1] == chosen).all()
    assert len(np.unique(chosen.reshape(-1, 4), axis=0)) > 20  # of 35 sets
    assert set(actual[2]) == set(want) and len(want) == case.cfg.n_layers * 17 + 3
    floor = worst_of_the_layers(naives, want)
    results = [check_deviation("logits", actual[0], [naive[0] for naive in naives], logits, dtype)]
    for tensor in want:
        assert np.abs(want[tensor]).max() > 0, f"{tensor} has no gradient to compare"
        tensor_naives = [naive[2][tensor] for naive in naives]
        floor_of_kind = floor[without_layer(tensor)]
        results.append(
            check_deviation(
                tensor, actual[2][tensor], tensor_naives, want[tensor], dtype, floor_of_kind
            )
        )
    results.sort(reverse=True)
    title = f"{name} {dtype} {numerics}: worst of {len(results)}"
    print(f"\n{title}: {results[0][0]:.2f} of the allowance")
    print("\n".join(f"  {share:.2f} {line}" for share, line in results[:4]))
    failures = [line for share, line in results if not share <= 1]
    assert not failures, "\n".join(failures)


EXTREMES = {  # factors of the weights whose names hold these, and how far sinks reach
    "scores": ({"q_proj": 4.0, "k_proj": 4.0}, None),
    "scores and sinks": ({"q_proj": 8.0, "k_proj": 8.0}, 80.0),
    "experts": ({"gate_up_proj": 8.0, "down_proj": 8.0}, None),
    "head": ({"lm_head": 20.0}, None),
}
MODELS = 5


def exaggerate_weights(hugging, seed: int, factors: dict[str, float], reach: float | None):
    model = hugging.model(seed, sliding_window=128)
    rng = np.random.default_rng(seed)
    with hugging.torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, factor in factors.items():
                if part in name:
                    parameter.mul_(factor)
            if reach is not None and name.endswith("sinks"):
                sinks = hugging.torch.tensor(rng.uniform(-reach, reach, parameter.shape))
                parameter.copy_(sinks.bfloat16().float())
    return model


def log_probs(logits_BTV, tokens_BT):
    """Return the log-prob of each token but the first, in float64."""
    shifted = logits_BTV - logits_BTV.max(-1, keepdims=True)
    logp_BTV = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(logp_BTV[:, :-1], tokens_BT[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("extreme", list(EXTREMES))
def test_log_probs_of_extreme_weights_err_like_transformers(hugging, tmp_path, extreme):
    """Compare errors to an oracle; the difference of the two reveals little, since both err, by up
    to 1.5e-3 nats.

    One model is one draw of the rounding, and the worst of several models counts on either side. No
    gradients: a gate within rounding of the SwiGLU's limit has one on one side only.
    """
    errors, max_gap = [], 0.0
    for seed in range(MODELS):
        model = exaggerate_weights(hugging, seed, *EXTREMES[extreme])
        model.save_pretrained(tmp_path / str(seed))
        cfg = dataclasses.replace(from_hf(model.config.to_dict()), dtype="float32")
        tokens_BT = np.random.default_rng(1).integers(0, cfg.vocab_size, (1, 160))
        positions_BT = np.arange(160)[None]
        params = load_params(tmp_path / str(seed), cfg, "float32")
        case = Case(model, cfg, params, tokens_BT, positions_BT, np.zeros(0), ())
        inputs = (tokens_BT, positions_BT)
        want, jax_logp, hf_logp = (
            log_probs(logits, tokens_BT)
            for logits in (
                hugging.run(hugging.oracle(model), *inputs)[0],
                our_logits(case),
                hugging.run(model, *inputs)[0],
            )
        )
        errors.append(
            (np.abs(jax_logp - want).max(), np.abs(hf_logp - want).max(), np.abs(want).max())
        )
        max_gap = max(max_gap, np.abs(jax_logp - hf_logp).max())
    jax_error, transformers, size = np.max(errors, axis=0)
    line = f"{extreme}: ours {jax_error:.2e}, theirs {transformers:.2e}, apart {max_gap:.2e}"
    print(f"\n{line}; by model " + ", ".join(f"{a:.1e} to {b:.1e}" for a, b, _ in errors))
    assert jax_error <= 2 * transformers + 2 * EPS["float32"] * size, line


def test_frequencies_equal_transformers_in_every_bit(make_case):
    case = make_case(**CASES["far"])
    frequencies, factor = yarn_frequencies(case.cfg)
    rope = case.model.model.rotary_emb
    assert frequencies.dtype == np.float32
    assert frequencies.tolist() == rope.inv_freq.tolist()
    assert factor == rope.attention_scaling


def without_sinks(params):
    layers = {
        kind: layer | {"sinks": np.full_like(layer["sinks"], -1e9)}
        for kind, layer in params["layers"].items()
    }
    return params | {"layers": layers}


def softmax_first(h_BTD, layer, *, active):
    logits_BTE = h_BTD @ layer["w_router"] + layer["b_router"][None, None, :]
    top_BTA, indices_BTA = jax.lax.top_k(jax.nn.softmax(logits_BTE, axis=-1), active)
    return indices_BTA, top_BTA


BROKEN = {
    "no sink": lambda case: our_logits(case, without_sinks(case.params)),
    "window + 1": lambda case: our_logits(case, sliding_window=case.cfg.sliding_window + 1),
    "window - 1": lambda case: our_logits(case, sliding_window=case.cfg.sliding_window - 1),
    "YaRN truncated": lambda case: our_logits(case, rope_truncate=True),
    "no YaRN": lambda case: our_logits(case, rope_factor=1.0),
    "no SwiGLU limit": lambda case: our_logits(case, swiglu_limit=1e9),
    "softmax before top-k": lambda case: our_logits(case, router=softmax_first),
}


@pytest.mark.parametrize("mistake", list(BROKEN))
def test_a_mistake_is_seen(make_case, hugging, mistake):
    case = make_case(**CASES["far"])
    naives = [naive[0] for naive in run_hf(case, hugging, "float32")]
    share, line = check_deviation(
        "logits", BROKEN[mistake](case), naives, case.oracle[0], "float32"
    )
    print(f"\n{mistake}: {share:.0f} times the allowance; {line}")
    assert share > 10, line


def test_the_right_forward_is_no_mistake(make_case, hugging):
    case = make_case(**CASES["far"])
    naives = [naive[0] for naive in run_hf(case, hugging, "float32")]
    share, line = check_deviation("logits", our_logits(case), naives, case.oracle[0], "float32")
    assert share <= 1, line
