# SPDX-License-Identifier: Apache-2.0
"""Functions by name: what a config may say, and what each mistake is answered."""

import sys
from functools import partial

import pytest

from jaxmoe import losses
from jaxmoe.config import ConfigError, function_specs
from jaxmoe.config.function_specs import array_parameters, select_arrays
from jaxmoe.config_file import load_config, override
from jaxmoe.rl.algorithm import ARRAYS, CHOICES, LOSSES
from jaxmoe.rl.from_config import algorithm_from_config

parse_function = partial(function_specs.parse_function, builtins=LOSSES)
parse_functions = partial(function_specs.parse_functions, builtins=LOSSES)
OBJECTIVE, CORRECTION = ARRAYS["objective"], ARRAYS["rollout_correction"]


@pytest.fixture
def my_losses(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("text", ["ppo_clip", "ppo_clip()", "  ppo_clip "])
def test_a_bare_name_is_the_function_itself(text):
    assert parse_function(text, "loss.objective", OBJECTIVE) is losses.ppo_clip


def test_options_are_bound_as_the_literals_they_are():
    function = parse_function("ppo_clip(clip_high=0.28, dual_clip=3)", "loss.objective", OBJECTIVE)
    assert isinstance(function, partial) and function.func is losses.ppo_clip
    assert function.keywords == {"clip_high": 0.28, "dual_clip": 3} and function.args == ()
    assert type(function.keywords["dual_clip"]) is int


def test_several_are_read_in_their_order():
    text = "rejection(statistic='token_k1', low=0.5, high=2.0) + token_is(high=3.0) + veto"
    first, second, third = parse_functions(text, "loss.rollout_correction", CORRECTION)
    assert first.func is losses.rejection and first.keywords["statistic"] == "token_k1"
    assert second.func is losses.token_is and second.keywords == {"high": 3.0}
    assert third is losses.veto


def test_a_plus_inside_an_option_does_not_divide():
    function = parse_functions(
        "token_is + rejection(statistic='+', high=1.0)", "loss.rollout_correction", CORRECTION
    )
    assert len(function) == 2 and function[1].keywords["statistic"] == "+"


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_no_function(text):
    assert parse_functions(text, "loss.rollout_correction", CORRECTION) == ()


def test_a_function_of_ones_own_is_found_by_its_module(my_losses):
    function = parse_function("my_losses:terms(beta=2.0)", "loss.objective", OBJECTIVE)
    assert function(3.0, 5.0) == 30.0
    assert array_parameters(function) == ("logp_BT", "advantages_BT")
    positional = parse_function("my_losses:soft(tau=2.0)", "loss.objective", OBJECTIVE)
    assert positional(3.0) == 1.5 and array_parameters(positional) == ("logp_BT",)


def test_a_function_gets_the_arrays_it_names_and_no_other(my_losses):
    function = parse_function("my_losses:terms", "loss.objective", OBJECTIVE)
    arrays = {"logp_BT": 3.0, "advantages_BT": 5.0, "mask_BT": None, "old_logp_BT": None}
    assert function(**select_arrays(function, arrays)) == 7.5
    with pytest.raises(ConfigError, match="terms takes advantages_BT, which is not"):
        select_arrays(function, {"logp_BT": 3.0})


def test_options_and_defaults_are_not_asked_for():
    assert array_parameters(losses.rejection) == ("log_ratio_BT", "mask_BT")
    assert array_parameters(partial(losses.gae, trace=0.9)) == (
        "rewards_BT",
        "values_BT",
        "mask_BT",
    )
    assert array_parameters(losses.seq_mean_token_sum_norm) == ("mask_BT",)


CALL = 'Try --set "loss.x=name(option=1.0)".'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # not a call with literal keywords
        ("ppo_clip(0.2)", CALL),
        ("ppo_clip(*[0.2])", CALL),
        ("ppo_clip(**{'clip_low': 0.2})", CALL),
        ("ppo_clip(clip_low=x)", CALL),
        ("ppo_clip(clip_low=float('inf'))", CALL),
        ("ppo_clip(clip_low=0.1, clip_low=0.3)", CALL),
        ("ppo_clip(clip_low=0.2", CALL),
        ("ppo_clip(clip_low=0.1)(clip_high=0.3)", CALL),
        ("ppo_clip)", CALL),
        ("clipped terms", CALL),
        ("my_losses:", CALL),
        (":terms", CALL),
        ("", CALL),
        # a name that is not there
        ("ppo_clp", "'ppo_clp'. Did you mean ppo_clip?"),
        ("zzz(a=1)", "there is no function 'zzz'. Known: bootstrapped_gae, "),
        ("seq_mean_token_sum", "Did you mean seq_mean_token_sum_norm?"),
        ("jnp", "there is no function 'jnp'."),  # imported there, and not offered
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
        ("ppo_clip(clip_hgih=0.3)", "no option 'clip_hgih'. Did you mean clip_high?"),
        ("ppo_clip(zzz=1)", "no option 'zzz'. Known: clip_low, clip_high, dual_clip."),
        ("reinforce(zzz=1)", "reinforce has no option 'zzz'. Known: none."),
        ("my_losses:terms(logp_BT=1)", "terms has no option 'logp_BT'. Known: beta."),
        # an array that is not there
        (
            "my_losses:odd",
            "odd takes surprise_BT, which is not available here. A function of loss.x",
        ),
        ("gae", "gae takes rewards_BT, which is not available here"),
    ],
)
def test_each_mistake_is_one_line_that_says_where_and_what_to_type(my_losses, text, answer):
    with pytest.raises(ConfigError) as error:
        parse_function(text, "loss.x", OBJECTIVE)
    message = str(error.value)
    assert message.startswith("loss.x") and answer in message and "\n" not in message
    assert answer != CALL or f"got {text!r}" in message


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "rejection(high=2.0)",
            'rejection needs statistic. Try --set "loss.x=rejection(statistic=…)".',
        ),
        ("drift_mask", 'drift_mask needs max_drift. Try --set "loss.x=drift_mask(max_drift=…)".'),
        ("token_is + ", CALL),
        ("+ token_is", CALL),
        ("token_is * veto", CALL),
        ("token_is + vetto", "there is no function 'vetto'. Did you mean veto?"),
    ],
)
def test_each_mistake_in_a_sum_is_found(text, answer):
    with pytest.raises(ConfigError) as error:
        parse_functions(text, "loss.x", CORRECTION)
    assert str(error.value).startswith("loss.x") and answer in str(error.value)


OPTIONS = {
    "seq_mean_token_sum_norm": "(length=8)",
    "rejection": "(statistic='token_k1', high=2.0)",
    "drift_mask": "(max_drift=1.0)",
}


@pytest.mark.parametrize("kind, name", [(kind, x) for kind in CHOICES for x in CHOICES[kind]])
def test_what_an_error_suggests_is_then_accepted(kind, name):
    function = parse_function(name + OPTIONS.get(name, ""), kind, ARRAYS[kind])
    assert getattr(function, "func", function) is getattr(losses, name)


def test_an_unknown_objective_is_answered_with_objectives_alone():
    with pytest.raises(ConfigError) as error:
        algorithm_from_config(override(load_config("tiny.py"), "loss.objective=my_loss"))
    assert "Known: ppo_clip, gspo, cispo, sapo, dppo_tv, reinforce, rspo, erpo, switch_" in str(
        error.value
    )
    assert "grpo_loss" not in str(error.value)
