# SPDX-License-Identifier: Apache-2.0
"""verl's presets: their settings, and what may stand beside one."""

from dataclasses import replace

import pytest
from algorithm_configs import CORR, config, refusal

from jaxmoe import losses
from jaxmoe.config import LossConfig
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.presets import PRESETS, apply_preset


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_at_one_and_two_updates(name, updates):
    algorithm = algorithm_from_config(config(preset=name, minibatches=updates))
    if name.startswith("bypass_ppo"):
        want = "rollout", losses.ppo_clip
    elif name.startswith("bypass_pg"):
        want = "detached", losses.reinforce
    else:  # with one update, detaching is the same number for a forward less
        want = "detached" if updates == 1 else "recomputed", losses.ppo_clip
    assert (algorithm.old_logp, algorithm.objective) == want
    assert algorithm.needs_scoring == (want[0] == "recomputed")


# RolloutCorrectionConfig: rollout_is with its threshold, rollout_rs with its bounds
TOKEN, SEQ, ICEPOP = ("token_is", (2.0,)), ("sequence_is", (2.0,)), ("token_icepop", (0.5, 5.0))
SUM, GEO, K3 = ("seq_sum_k1", 0.5, 2.0), ("seq_mean_k1", 0.999, 1.001), ("seq_mean_k3", 0.01)
VERL = {
    "disabled": [],
    "decoupled_token_is": [TOKEN],
    "decoupled_seq_is": [SEQ],
    "decoupled_token_icepop": [ICEPOP],
    "decoupled_seq_is_rs": [SUM, SEQ],
    "decoupled_geo_rs": [GEO],
    "decoupled_geo_rs_seq_tis": [GEO, SEQ],
    "decoupled_geo_rs_token_tis": [GEO, TOKEN],
    "decoupled_k3_rs": [K3],
    "decoupled_k3_rs_seq_tis": [K3, SEQ],
    "decoupled_k3_rs_token_tis": [K3, TOKEN],
    "bypass_ppo_clip": [],
    "bypass_ppo_clip_geo_rs": [GEO],
    "bypass_ppo_clip_k3_rs": [K3],
    "bypass_pg_is": [SEQ],
    "bypass_pg_token_icepop": [ICEPOP],
    "bypass_pg_geo_rs": [GEO],
    "bypass_pg_geo_rs_seq_tis": [GEO, SEQ],
    "bypass_pg_geo_rs_token_tis": [GEO, TOKEN],
}


@pytest.mark.paper
def test_the_presets_are_verls_with_its_defaults():
    # verl verl/trainer/config/algorithm.py, RolloutCorrectionConfig's factory methods
    def spec_of(function):
        values = tuple(function.keywords.values())
        if function.func is losses.rejection:
            return values
        return function.func.__name__, values

    names = {
        name: [spec_of(f) for f in algorithm_from_config(config(preset=name)).rollout_correction]
        for name in PRESETS
    }
    assert names == VERL


@pytest.mark.parametrize("name", PRESETS)
def test_decoupled_rejection_divides_by_retained_tokens_by_default(name):
    algorithm = algorithm_from_config(config(preset=name))
    drops = name.startswith("decoupled") and any(
        f.func is losses.rejection for f in algorithm.rollout_correction
    )
    assert algorithm.aggregation is (losses.kept_token_mean if drops else losses.token_mean)
    other_aggregation = algorithm_from_config(
        config(preset=name, aggregation="seq_mean_token_mean")
    )
    assert other_aggregation.aggregation is losses.seq_mean_token_mean


def test_recomputed_asked_for_beside_a_preset_is_kept():
    assert algorithm_from_config(
        config(preset="decoupled_seq_is", old_logp="recomputed")
    ).needs_scoring


def test_other_settings_stay_beside_a_preset():
    loss = LossConfig(preset="decoupled_geo_rs", advantages="rloo_advantages", epochs=3)
    assert apply_preset(loss) == replace(
        loss,
        preset="",
        rollout_correction=PRESETS["decoupled_geo_rs"]["rollout_correction"],
        old_logp="recomputed",
        aggregation="kept_token_mean",
    )
    assert apply_preset(LossConfig(epochs=3)) == LossConfig(epochs=3)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (
            {"preset": "decoupled_token_is", CORR: "veto"},
            "loss.preset=decoupled_token_is sets loss.rollout_correction='token_is(high=2.0)', but "
            "the config sets 'veto'. Try --set loss.rollout_correction=, or --set loss.preset=''.",
        ),
        ({"preset": "disabled", CORR: "token_is"}, "sets loss.rollout_correction=''"),
        (
            {"preset": "decoupled_token_is", "old_logp": "rollout"},
            "but the config sets 'rollout'. Try --set loss.old_logp=detached",
        ),
        ({"preset": "bypass_ppo_clip", "old_logp": "recomputed"}, "sets loss.old_logp='rollout'"),
        (
            {"preset": "bypass_pg_is", "objective": "gspo"},
            "sets loss.objective='reinforce', but the config sets 'gspo'. Try --set "
            "loss.objective=ppo_clip, or --set loss.preset=''.",
        ),
    ],
)
def test_contradictory_presets_and_fields_are_refused(fields, answer):
    assert answer in refusal(**fields)


def test_a_field_equal_to_its_preset_is_accepted():
    algorithm = algorithm_from_config(
        config(preset="decoupled_token_is", rollout_correction="token_is(high=2.0)")
    )
    assert len(algorithm.rollout_correction) == 1
    assert (
        algorithm_from_config(config(preset="bypass_ppo_clip", old_logp="rollout")).old_logp
        == "rollout"
    )
