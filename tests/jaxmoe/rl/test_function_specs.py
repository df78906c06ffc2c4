# SPDX-License-Identifier: Apache-2.0
"""Functions by name: what a config may say, and what each mistake is answered."""

import sys
from functools import partial

import pytest

from jaxmoe import losses
from jaxmoe.config import ConfigError
from jaxmoe.rl.algorithm import ARRAYS
from jaxmoe.rl.function_specs import arguments, asked, read, read_several

OBJECTIVE, CORRECTION = ARRAYS["objective"], ARRAYS["rollout_correction"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of one's own, importable as my_losses."""
    (tmp_path / "my_losses.py").write_text(
        "import math\n"
        "def terms(logp_BT, advantages_BT, *, beta=0.5): return logp_BT * advantages_BT * beta\n"
        "def soft(logp_BT, tau=1.0): return logp_BT / tau\n"
        "def odd(logp_BT, surprise_BT): return logp_BT\n"
        "async def later(logp_BT): return logp_BT\n"
        "def nothing(*logp_BT, beta=1.0): return beta\n"
        "tau = 3.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_losses", None)
    yield
    sys.modules.pop("my_losses", None)


@pytest.mark.parametrize("text", ["clipped_terms", "clipped_terms()", "  clipped_terms "])
def test_a_bare_name_is_the_function_itself(text):
    assert read(text, "loss.objective", OBJECTIVE) is losses.clipped_terms


def test_options_are_bound_as_the_literals_they_are():
    got = read("clipped_terms(clip_high=0.28, dual_clip=3)", "loss.objective", OBJECTIVE)
    assert isinstance(got, partial) and got.func is losses.clipped_terms
    assert got.keywords == {"clip_high": 0.28, "dual_clip": 3} and got.args == ()
    assert type(got.keywords["dual_clip"]) is int


def test_several_are_read_in_their_order():
    text = "rejection(by='token_k1', low=0.5, high=2.0) + token_is(high=3.0) + veto"
    first, second, third = read_several(text, "loss.rollout_correction", CORRECTION)
    assert first.func is losses.rejection and first.keywords["by"] == "token_k1"
    assert second.func is losses.token_is and second.keywords == {"high": 3.0}
    assert third is losses.veto


def test_a_plus_inside_an_option_does_not_divide():
    got = read_several(
        "token_is + rejection(by='+', high=1.0)", "loss.rollout_correction", CORRECTION
    )
    assert len(got) == 2 and got[1].keywords["by"] == "+"


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_no_function(text):
    assert read_several(text, "loss.rollout_correction", CORRECTION) == ()


def test_a_function_of_ones_own_is_found_by_its_module(mine):
    got = read("my_losses:terms(beta=2.0)", "loss.objective", OBJECTIVE)
    assert got(3.0, 5.0) == 30.0
    assert asked(got) == ["logp_BT", "advantages_BT"]
    positional = read("my_losses:soft(tau=2.0)", "loss.objective", OBJECTIVE)
    assert positional(3.0) == 1.5 and asked(positional) == ["logp_BT"]


def test_a_function_gets_the_arrays_it_names_and_no_other(mine):
    got = read("my_losses:terms", "loss.objective", OBJECTIVE)
    arrays = {"logp_BT": 3.0, "advantages_BT": 5.0, "mask_BT": None, "old_logp_BT": None}
    assert got(**arguments(got, arrays)) == 7.5
    with pytest.raises(KeyError, match="advantages_BT"):
        arguments(got, {"logp_BT": 3.0})


def test_options_and_defaults_are_not_asked_for():
    assert asked(losses.rejection) == ["log_ratio_BT", "mask_BT"]
    assert asked(partial(losses.gae, trace=0.9)) == ["rewards_BT", "values_BT", "mask_BT"]
    assert asked(losses.seq_mean_token_sum_norm) == ["mask_BT"]


CALL = 'Try --set "loss.x=name(option=1.0)".'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # not a call with literal keywords
        ("clipped_terms(0.2)", CALL),
        ("clipped_terms(*[0.2])", CALL),
        ("clipped_terms(**{'clip_low': 0.2})", CALL),
        ("clipped_terms(clip_low=x)", CALL),
        ("clipped_terms(clip_low=float('inf'))", CALL),
        ("clipped_terms(clip_low=0.1, clip_low=0.3)", CALL),
        ("clipped_terms(clip_low=0.2", CALL),
        ("clipped_terms(clip_low=0.1)(clip_high=0.3)", CALL),
        ("clipped_terms)", CALL),
        ("clipped terms", CALL),
        ("my_losses:", CALL),
        (":terms", CALL),
        ("", CALL),
        # a name that is not there
        ("cliped_terms", "'cliped_terms'. Did you mean clipped_terms?"),
        ("zzz(a=1)", "jaxmoe.losses has no function 'zzz'. Or name your own: module:function."),
        ("fixed_length_weights", "Did you mean seq_mean_token_sum_norm?"),
        ("jnp", "jaxmoe.losses has no function 'jnp'."),  # imported there, and not offered
        ("no_such_module:f", "no_such_module:f must be a function that can be imported; No module"),
        ("my_losses:f", "my_losses:f must be a function that can be imported; module 'my_losses'"),
        ("my_losses:tau", "my_losses:tau must be a function written in Python with def, got float"),
        ("my_losses:later", "must be a function written in Python with def, got one that is async"),
        ("my_losses.py:tau", ". Name the module without .py, my_losses:tau."),
        ("no_such_folder:f", ". Put its folder on the Python path (PYTHONPATH=FOLDER)."),
        # programs, not functions of arrays
        ("subprocess:Popen(args=['true'])", "must be a function written in Python with def, got t"),
        ("os:system(command='true')", "with def, got builtin_function_or_method"),
        ("shutil:rmtree(path='/nowhere')", "rmtree must take arrays by position and options by k"),
        ("subprocess:call(args='true')", "call has no option 'args'."),
        ("subprocess:call(timeout=1)", "call must take arrays by position"),
        ("my_losses:nothing", "nothing must take arrays by position and options by keyword; it ta"),
        # an option that is not there, or is missing
        ("clipped_terms(clip_hgih=0.3)", "no option 'clip_hgih'. Did you mean clip_high?"),
        ("clipped_terms(zzz=1)", "no option 'zzz'. Known: clip_low, clip_high, dual_clip."),
        ("reinforce_terms(zzz=1)", "reinforce_terms has no option 'zzz'. Known: none."),
        ("my_losses:terms(logp_BT=1)", "terms has no option 'logp_BT'. Known: beta."),
        # an array that is not there
        ("my_losses:odd", "odd asks for surprise_BT; here a function may ask for logp_BT, old_l"),
        ("gae", "gae asks for rewards_BT; here a function may ask for logp_BT"),
    ],
)
def test_each_mistake_is_one_line_that_says_where_and_what_to_type(mine, text, answer):
    with pytest.raises(ConfigError) as error:
        read(text, "loss.x", OBJECTIVE)
    message = str(error.value)
    assert message.startswith("loss.x") and answer in message and "\n" not in message
    assert answer != CALL or f"got {text!r}" in message


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("rejection(high=2.0)", 'rejection needs by. Try --set "loss.x=rejection(by=…)".'),
        ("drift_mask", 'drift_mask needs most. Try --set "loss.x=drift_mask(most=…)".'),
        ("token_is + ", CALL),
        ("+ token_is", CALL),
        ("token_is * veto", CALL),
        ("token_is + vetto", "has no function 'vetto'. Did you mean veto?"),
    ],
)
def test_each_mistake_in_a_sum_is_found(text, answer):
    with pytest.raises(ConfigError) as error:
        read_several(text, "loss.x", CORRECTION)
    assert str(error.value).startswith("loss.x") and answer in str(error.value)


def test_every_exported_recipe_objective_and_denominator_reads_without_options():
    kinds = {
        "objective": "clipped_terms gspo_terms cispo_terms sapo_terms dppo_tv_terms "
        "reinforce_terms",
        "advantages": "group_advantages rloo_advantages gae reinforce_pp_advantages "
        "reinforce_pp_baseline_advantages",
        "aggregation": "token_mean seq_mean_token_mean kept_token_mean",
        "rollout_correction": "token_is sequence_is geometric_is token_icepop sequence_icepop "
        "normalize veto",
        "kl": "kl_k1 kl_k2 kl_k3 kl_k3_with_k2_gradient",
    }
    for kind, names in kinds.items():
        for name in names.split():
            assert read(name, kind, ARRAYS[kind]) is getattr(losses, name)
