# SPDX-License-Identifier: Apache-2.0
"""The exact study of routers on answers of two tokens: identities that need no seeds."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import studies.__main__ as command
from jaxmoe.model import forward, plain_ops
from jaxmoe.study import ResultsStore
from studies.estimators import compare_bias, measure_estimator, policy_gradient, pool_models
from studies.micro_model import MicroSizes, answer_logprobs
from studies.micro_tables import MicroModel
from studies.router_exact import RouterStudy, run_router_exact
from studies.router_remedies import ENGINE_ESTIMATORS, FORWARD_ESTIMATORS
from studies.router_report import format_tables
from studies.router_scenarios import make_engine_scenarios, make_update_scenario, ravel_numpy

ROUNDING = 1e-12  # of a length relative to the policy gradient's


@cache
def study():
    return RouterStudy(MicroSizes(length=2), noises=(0.0, 0.3), steps=(0.0, 3e-3))


@cache
def measured(seed=0):
    return study().measure_model(seed)


def biases(key, target="trainer"):
    """Length of each estimator's bias relative to the target."""
    return {
        name: pool_models([sums], target).bias
        for name, sums in measured()[key]["estimators"].items()
    }


@pytest.mark.slow
def test_the_noise_of_these_tests_switches_experts():
    for key in ("selection 0.3", "weights 0.3", "forward 0.3", "update 0.003"):
        assert measured()[key]["statistics"]["switched"] > 0.1, key


@pytest.mark.slow
@pytest.mark.parametrize("key", ["selection 0.3", "weights 0.3", "update 0.003", "frozen 0.003"])
def test_unbounded_sequence_weights_have_no_bias(key):
    bias = biases(key)
    assert bias["sequence_is(inf)"] < ROUNDING
    # Each of the others has one here, so that a comparison with the wrong target would show.
    names = ("no ratio (REINFORCE)", "token_is(2)", "ppo_clip", "no correction")
    assert all(bias[name] > 1e-3 for name in names if name in bias)


@pytest.mark.parametrize("key", ["selection 0", "weights 0"])
@pytest.mark.parametrize("target", ["trainer", "engine"])
def test_without_noise_only_other_router_gradients_are_biased(key, target):
    for name, bias in biases(key, target).items():
        changes_router = name.startswith(("straight-through", "router.freeze"))
        assert bias > 1e-2 if changes_router else bias < ROUNDING, name


@pytest.mark.parametrize("key", ["forward 0", "update 0", "frozen 0"])
def test_one_forward_and_one_step_bias_no_ratio(key):
    for name, bias in biases(key).items():
        changes_router = name.startswith(("straight-through", "router.freeze"))
        assert changes_router or bias < ROUNDING, name


def test_detached_old_logprobs_do_not_see_second_forwards():
    bias = biases("forward 0.3")
    assert bias["old_logp=detached"] < ROUNDING < bias["surrogate, no clip"]


def test_replay_estimates_the_noisy_engines_gradient():
    assert biases("selection 0.3", "engine")["R3"] < ROUNDING
    assert biases("selection 0.3", "trainer")["R3"] > 1e-2
    # With other weights the engine's policy is not the replayed one.
    assert biases("weights 0.3", "engine")["R3"] > 1e-2
    assert measured()["selection 0.3"]["statistics"]["gap_replayed"] < 1e-14


def test_soft_routing_is_immune_to_selection_noise():
    assert biases("selection 0.3")["soft routing"] < ROUNDING
    assert biases("weights 0.3")["soft routing"] > 1e-3


def test_annealed_routing_is_its_policy_and_half_selects():
    assert biases("weights 0")["annealed, halfway"] < ROUNDING
    assert biases("weights 0.3")["annealed, halfway"] > 1e-3
    gaps = measured()["weights 0.3"]["statistics"]
    # Half of its weights are those of a softmax, so the same noise moves it less than top-k.
    assert gaps["gap_soft"] < gaps["gap_annealed"] < gaps["gap"]


def test_a_frozen_routers_bias_is_its_gradient_part():
    model = MicroModel(study().programs, 0)
    target = policy_gradient(model.current[0], model.answers.pairs_BT, model.rewards_B)
    router_part = np.linalg.norm(target[model.is_router_N]) / np.linalg.norm(target)
    assert biases("selection 0")["router.freeze"] == pytest.approx(router_part, rel=1e-12)
    # With noise the rest of the gradient has the bias that it has without freezing.
    sums = measured()["selection 0.3"]["estimators"]
    assert sums["router.freeze"]["mean"] < sums["no correction"]["mean"]


def test_the_policy_gradient_is_that_of_central_differences():
    model = MicroModel(study().programs, 0)
    params_N, unravel = ravel_numpy(model.params)
    direction_N = np.random.default_rng(0).normal(size=len(params_N))
    step = 1e-6

    def value(params_N):
        logp_BT, _ = model.run_logprobs(unravel(params_N))
        return np.exp(logp_BT.sum(axis=1)) @ model.rewards_B

    change = value(params_N + step * direction_N) - value(params_N - step * direction_N)
    gradient_N = policy_gradient(model.current[0], model.answers.pairs_BT, model.rewards_B)
    assert change / (2 * step) == pytest.approx(gradient_N @ direction_N, rel=1e-6)


def test_mean_and_deviation_match_the_answers_gradients():
    model = MicroModel(study().programs, 0)
    scenario, _, _ = make_engine_scenarios(model, 0.3, noise="selection")
    weights_BT = np.random.default_rng(1).normal(size=scenario.pairs_BT.shape)
    table, keep_N = scenario.forwards["current"], np.ones(len(model.is_router_N))
    sums = measure_estimator(scenario, table, weights_BT, keep_N)
    gradients_BN = np.einsum("bt,btn->bn", weights_BT, table.gradients_PN[scenario.pairs_BT])
    mean_N = scenario.sampler_B @ gradients_BN
    spread = scenario.sampler_B @ np.square(gradients_BN - mean_N).sum(axis=1)
    error_N = mean_N - scenario.targets["trainer"]
    assert sums["mean"] == pytest.approx(mean_N @ mean_N)
    assert sums["spread"] == pytest.approx(spread)
    assert sums["trainer/bias"] == pytest.approx(error_N @ error_N)


def test_a_surrogate_is_exact_for_zero_steps_only():
    for key, is_exact in (("update 0", True), ("update 0.003", False)):
        statistics = measured()[key]["statistics"]
        for name in ("current", "replayed", "soft", "annealed"):
            assert (statistics[f"surrogate_error_{name}"] < 1e-14) == is_exact, (key, name)


def test_a_frozen_router_does_not_move():
    model = MicroModel(study().programs, 0)
    scenario, _ = make_update_scenario(model, 3e-3, trains_router=False)
    assert np.all(scenario.targets["trainer"][model.is_router_N] == 0.0)


def test_dense_experts_equal_the_models_experts():
    model = MicroModel(study().programs, 0)
    answers, cfg = model.answers, model.sizes.config
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model.params)
    inputs, tokens = jnp.asarray(answers.inputs_BT), jnp.asarray(answers.tokens_BT)
    ops = plain_ops()
    hidden_BTD, _, _ = forward(params, inputs, cfg, ops)
    logp_BTV = jax.nn.log_softmax(ops.logits(hidden_BTD, params["head"]), axis=-1)
    expected_BT = jnp.take_along_axis(logp_BTV, tokens[..., None], axis=-1)[..., 0]
    logp_BT, _ = answer_logprobs(params, inputs, tokens, cfg, ops.router)
    np.testing.assert_allclose(logp_BT, expected_BT, atol=1e-5)
    np.testing.assert_allclose(model.current[0].logp_BT, expected_BT, atol=1e-5)


def test_no_two_estimators_share_a_name():
    for estimators in (ENGINE_ESTIMATORS, FORWARD_ESTIMATORS):
        assert len({x.name for x in estimators}) == len(estimators)


def test_a_stopped_study_continues_with_stored_models(tmp_path):
    lines, path = [], tmp_path / "router_exact.jsonl"

    def stop_after_first(line):
        lines.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_router_exact(ResultsStore(path), 2, study(), stop_after_first)
    results = run_router_exact(ResultsStore(path), 2, study(), lines.append)
    assert lines[0].startswith("model 1 of 2: ") and lines[0].endswith(" s")
    assert lines[1] == "model 1 of 2: stored" and lines[2].startswith("model 2 of 2: ")
    assert results[0] == measured(0)
    # The second table is that of the weights, and its second column that of the noise.
    row = [x for x in format_tables(results).splitlines() if x.startswith("| R3 |")][1]
    bias = pool_models([x["weights 0.3"]["estimators"]["R3"] for x in results], "trainer").bias
    assert row.split(" | ")[2].startswith(f"{bias:.2f} ± ")


@pytest.fixture
def small_study(monkeypatch):
    monkeypatch.setattr(command, "RouterStudy", lambda sizes: study())


def test_the_command_writes_its_tables_and_figure(tmp_path, small_study, capsys):
    folder = tmp_path / "exact"
    assert command.main(["router_exact", "--models", "1", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "model 1 of 1" in printed and "| sequence_is(inf) | 0.00, " in printed
    assert (folder / "router_exact.md").read_text() in printed
    assert (folder / "router_exact.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_says_how_to_continue(tmp_path, small_study, monkeypatch, capsys):
    def stop(seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(study(), "measure_model", stop)
    assert command.main(["router_exact", "--out", str(tmp_path)]) == 130
    assert "the same command continues" in capsys.readouterr().out


def test_a_users_mistake_is_one_line(tmp_path, small_study, capsys):
    (tmp_path / "router_exact.jsonl").write_text("{}\n")
    for argv in (["--models", "0"], ["--models", "1"]):
        assert command.main(["router_exact", *argv, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_bias_differences_are_in_units_of_their_error():
    def models(bias):
        return [{"x/bias": b**2, "x/target": 1.0} for b in bias]

    low, high = models([0.1, 0.3, 0.2, 0.5]), models([0.2, 0.4, 0.31, 0.6])
    assert compare_bias(low, low, "x") == 0.0
    # Each bias has a large error over these models. Their difference does not.
    assert compare_bias(high, low, "x") > 4.0 and compare_bias(low, high, "x") < -4.0
    assert compare_bias(high[:1], low[:1], "x") == 0.0  # one model has no error
