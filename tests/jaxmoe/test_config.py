# SPDX-License-Identifier: Apache-2.0
"""Configs: what a file may say, what --set may change, and what a mistake is answered."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.config import Config, ConfigError, to_json
from jaxmoe.config_file import load_config, override

TINY = load_config("tiny.py")
SHIPPED = [
    "gptoss120b.py",
    "gptoss120b_lora.py",
    "gptoss20b.py",
    "gptoss20b_distill.py",
    "gptoss20b_gsm8k.py",
    "gptoss20b_long.py",
    "gptoss20b_lora.py",
    "gptoss20b_mxfp4.py",
    "gptoss20b_ppo.py",
    "gptoss20b_retool.py",
    "gptoss20b_verif.py",
    "tiny.py",
    "tiny_distill.py",
    "tiny_hack.py",
    "tiny_if.py",
    "tiny_lora.py",
    "tiny_mxfp4.py",
    "tiny_tool.py",
    "tiny_turns.py",
    "tiny_vllm.py",
]


def lookup(config, path):
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("optim.lr=1e-4", 1e-4),
        ("optim.lr=1", 1.0),
        ("steps=7", 7),
        ("gate.skip=false", False),
        ("optim.remat=True", True),
        ("workdir=runs/123", "runs/123"),
        ("data.template=a=b", "a=b"),
        ("init.checkpoint=", ""),
        ("data.options.x=3", 3),
        ("data.options.x=false", False),
        ("data.options.name=spell", "spell"),
        ("data.options.pair=[1, 2]", [1, 2]),
        ("data.train_rows=all", "all"),
        ("data.train_rows=7", 7),
        ("data.task=a.jsonl", "a.jsonl"),
        ("data.task=['a.jsonl', 'b.jsonl']", ["a.jsonl", "b.jsonl"]),
        (" optim.lr =1e-4", 1e-4),
    ],
)
def test_an_override_has_its_fields_type(assignment, value):
    actual = lookup(override(TINY, assignment), assignment.partition("=")[0].strip())
    assert actual == value and type(actual) is type(value)


@pytest.mark.parametrize("folder", ["", " ", "gs://bucket/runs/20b", "s3://bucket", "file:///runs"])
def test_a_run_folder_is_a_local_path(folder):
    """Path makes a relative folder of a URL, and the current one of an empty text."""
    with pytest.raises(ConfigError, match=r"^workdir must be .* --workdir \S+\.$") as error:
        override(TINY, f"workdir={folder}")
    assert repr(folder) in str(error.value)
    assert ("Mount the bucket" in str(error.value)) == ("://" in folder)


def test_an_override_changes_one_field_of_a_copy():
    before = to_json(TINY)
    changed = override(TINY, "data.options.x=3")
    assert override(TINY, "data.options={}").data.options == {}
    assert to_json(TINY) == before
    assert changed.data.options == {**TINY.data.options, "x": 3}
    assert dataclasses.replace(changed, data=TINY.data) == TINY


@pytest.mark.parametrize(
    ("assignment", "answer"),
    [
        ("optim.lrr=1", "unknown config key optim.lrr. Did you mean optim.lr?"),
        ("optm.lr=1", "unknown config key optm. Did you mean optim?"),
        ("zzz=1", "Known: model, data"),
        ("rollout.router_replay=True", "key rollout.router_replay. Did you mean router.replay?"),
        ("router.replay=True", "got 'True'. Try --set router.replay=R3."),
        ("router.replay=r2", "got 'r2'. Try --set router.replay=R2."),
        ("router.replay=R2", "router.replay=R2 needs several updates per batch, got loss.mini"),
        ("steps", "--set takes key=value, got 'steps'"),
        ("optim=1", "--set optim needs a field"),
        ("data.options=1", "data.options must be a dict, got '1'. Try --set data.options.x=8"),
        ("steps.more=1", "steps is a value; steps.more does not exist"),
        ("steps=many", "steps must be int, got 'many'. Try --set steps=8"),
        ("steps=1.5", "steps must be int, got '1.5'"),
        ("data.train_rows=1.5", "data.train_rows must be int or str, got '1.5'"),
        ("steps=True", "steps must be int, got 'True'"),
        ("optim.remat=1", "optim.remat must be bool, got '1'. Try --set optim.remat=True"),
        ("optim.share_prompts=True", "got 'True'. Try --set optim.share_prompts=auto."),
        ("optim.remat_keeps=mlp", "got 'mlp'. Try --set optim.remat_keeps=attention"),
        ("optim.remat_keeps=attention", "needs optim.remat=True, got False. Try --set"),
        ("optim.remat_inputs=host", "Try --set optim.remat=True, or --set optim.remat_inputs=dev"),
        ("optim.moments=disk", "got 'disk'. Try --set optim.moments=host."),
        ("optim.lr=fast", "optim.lr must be float, got 'fast'. Try --set optim.lr=1e-4"),
    ],
)
def test_a_wrong_override_says_what_to_type(assignment, answer):
    with pytest.raises(ConfigError) as error:
        override(TINY, assignment)
    assert answer in str(error.value)


BROKEN = [  # by rules of several fields; those of one are in test_config_values.py
    "model.n_q_heads=7",
    "model.layer_types=sliding,full",
    "model.experts_per_token=9",
    "model.head_dim=15",
    "model.rms_eps=nan",
    "rollout.sequences_per_step=12",
    "rollout.engine=sglang",
    "loss.minibatches=3",
    "rollout.overlong_buffer=9",
    "optim.tokens_per_microbatch=9",
    "optim.microbatches=3",
    "warmup.sequences_per_step=0",
    "model.max_context=32",
    "data.max_prompt_tokens=999994",
]


@pytest.mark.parametrize("assignment", BROKEN)
def test_refusals_state_rule_value_and_command(assignment):
    with pytest.raises(ConfigError) as error:
        override(TINY, assignment)
    message, typed = str(error.value), assignment.partition("=")[2]
    assert "must" in message or "needs" in message
    typed = {"999994": str(999_994 + TINY.rollout.max_new_tokens)}.get(typed, typed)
    assert typed in message  # the sum of prompt and answer is what is bounded
    assert "Try --set " in message and "\n" not in message


@pytest.mark.parametrize(
    "assignment", [b for b in BROKEN if not b.startswith(("data.", "model.n_q", "optim"))]
)
def test_what_it_says_to_type_is_accepted(assignment):
    with pytest.raises(ConfigError) as error:
        override(TINY, assignment)
    advice = shlex.split(str(error.value).partition("Try ")[2].removesuffix("."))
    changes = [word for word in advice if "=" in word]
    assert advice == [word for change in changes for word in ("--set", change)]
    override(TINY, *([assignment] if assignment.startswith("model.max") else []), *changes)


def test_of_adapters_only_what_goes_together_is_taken():
    for changes, message in (
        (["modules_to_save=router"], "lora.modules_to_save .router. needs a rank"),
        (["embedding_rows=64"], "lora.embedding_rows .64. needs a rank"),
        (["attention_rank=2", "embedding_rows=-1"], "lora.embedding_rows must be 0 or more"),
        (["attention_rank=2", "targets=w_down"], "lora.attention_rank .2. must have a target"),
        (["expert_rank=2", "targets=w_q,w_o"], "lora.expert_rank .2. must have a target"),
        (
            ["attention_rank=2", "modules_to_save=head,embedding", "embedding_rows=64"],
            "lora.embedding_rows .64. must be 0 if the embedding is trained",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{message}.* Try --set [^ ]*$"):
            override(TINY, *(f"lora.{change}" for change in changes))
    value_only = override(TINY, "lora.attention_rank=2", "lora.targets=w_v, w_q").lora
    assert value_only.ranks == {"w_q": 2, "w_v": 2} and value_only.fully_trained == frozenset()
    with_modules = override(
        TINY, "lora.attention_rank=2", "lora.modules_to_save=router, sinks"
    ).lora
    assert with_modules.fully_trained == {"w_router", "b_router", "sinks"}
    plain = override(TINY, "model.layer_types=full(sinks=False)", "lora.attention_rank=2")
    with pytest.raises(ConfigError, match="needs layers with sinks"):
        override(plain, "lora.modules_to_save=norms, sinks")


def test_vllms_truncation_at_another_temperature_is_refused():
    cut = ("rollout.top_p=0.9", "rollout.temperature=0.7")
    assert override(TINY, *cut).rollout.top_p == 0.9
    with pytest.raises(ConfigError, match=r"must be 1 if .*\(0.9\) are on, got 0.7.* Try --set"):
        override(TINY, *cut, "rollout.engine=vllm")
    assert override(TINY, cut[0], "rollout.engine=vllm").rollout.temperature == 1.0


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "http://h:port", "http://h:99999", "ftp://h:1", "http://a:1,b"],
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(
        ConfigError, match="must name servers as http://HOST:PORT, got .* Try --set"
    ):
        override(TINY, f"rollout.vllm.url={url}")


def test_several_urls_and_a_path_are_taken():
    cfg = override(TINY, "rollout.vllm.url=http://a:1, https://[::1]:2/x")
    assert cfg.rollout.vllm.urls == ["http://a:1", "https://[::1]:2/x"]


def test_an_open_quote_in_vllms_options_is_refused():
    with pytest.raises(ConfigError, match="must be options as on a command line, got '--a \"b'"):
        override(TINY, 'rollout.vllm.args=--a "b')


def test_a_cut_is_not_sampled_ahead_by_vllm():
    ahead = ("rollout.engine=vllm", "rollout.max_staleness=1")
    override(TINY, *ahead)
    with pytest.raises(ConfigError, match="rollout.max_staleness must be 0 .* got 1"):
        override(TINY, *ahead, "rollout.top_k=5")


def test_warm_up_must_have_the_same_microbatches():
    with pytest.raises(ConfigError, match=r"warmup.sequences_per_step \(64\) .* Try --set warmup"):
        override(TINY, "optim.microbatches=128")


def test_pretraining_a_critic_leaves_steps_for_the_policy():
    ppo = load_config("gptoss20b_ppo.py")
    for steps, advice in ((20, 10), (10, 5), (1, 0)):
        message = rf"\(20\) must be below steps \({steps}\).* Try --set critic.pretrain_steps="
        with pytest.raises(ConfigError, match=f"{message}{advice}.$"):
            override(ppo, f"steps={steps}")
        override(ppo, f"steps={steps}", f"critic.pretrain_steps={advice}")
    assert override(ppo, "steps=21") and override(ppo, "steps=0")  # a warm start alone
    with pytest.raises(
        ConfigError, match=r"\(3\) needs a critic.* Try --set critic.pretrain_steps=0"
    ):
        override(TINY, "critic.pretrain_steps=3")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_loads_by_its_bare_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_config(name), Config)


def test_a_local_file_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "import dataclasses\nfrom jaxmoe.config_file import load_config\n"
        "def get_config():\n    return dataclasses.replace(load_config({!r}), seed=5)\n"
    )
    shipped = Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(text.format(str(shipped)))
    assert load_config("tiny.py").seed == 5


def test_an_unknown_file_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no 'tinny.py'. Shipped: .*Try --config tiny.py$"):
        load_config("tinny.py")
    with pytest.raises(ConfigError, match=f"Shipped: {', '.join(SHIPPED)}") as error:
        load_config("zzzzz")
    assert "__init__" not in str(error.value)


def test_a_file_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("# notes")
    with pytest.raises(ConfigError, match="must name a Python file, got .*notes.md"):
        load_config(str(tmp_path / "notes.md"))


def test_a_value_that_is_no_literal_is_refused():
    with pytest.raises(ConfigError, match="steps must be int, got '{..:1}'"):
        override(TINY, "steps={[]:1}")


def test_a_file_must_define_get_config(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("")
    with pytest.raises(ConfigError, match="must define get_config"):
        load_config(str(path))
    path.write_text("def get_config():\n    return 3\n")
    with pytest.raises(ConfigError, match="must return a jaxmoe.config.Config, got int"):
        load_config(str(path))


@pytest.mark.parametrize("name", SHIPPED)
def test_json_holds_every_field_and_rebuilds_the_config(name):
    config = load_config(name)
    assert rebuilt(config, json.loads(to_json(config))) == config


def rebuilt(like, saved):
    if not dataclasses.is_dataclass(like):
        return saved
    return type(like)(**{name: rebuilt(getattr(like, name), v) for name, v in saved.items()})


def test_dependent_changes_may_have_any_order():
    pair = ("rollout.samples_per_prompt=3", "rollout.sequences_per_step=12")
    for changes in (pair, pair[::-1]):
        cfg = override(TINY, *changes)
        assert cfg.rollout.prompts_per_step == 4


@pytest.mark.parametrize(
    "field, message",
    [
        (
            "rollout=RolloutConfig(8, 8, 8, max_gen_batch=4)",
            "RolloutConfig has no field 'max_gen_batch'. Did you mean max_gen_batches?",
        ),
        (
            "rollout=RolloutConfig(8, 8, 8, router_replay=True)",
            "RolloutConfig has no field 'router_replay'. Did you mean router.replay?",
        ),
        ("optm=o", "Config has no field 'optm'. Did you mean optim?"),
        ("optim=OptimConfig(lr=1.0, zzz=1.0)", "OptimConfig has no field 'zzz'. Known: lr, "),
    ],
)
def test_a_config_files_unknown_field_is_one_line(tmp_path, field, message):
    file = tmp_path / "own.py"
    file.write_text(
        "from jaxmoe.config import Config, OptimConfig, RolloutConfig\n"
        "from jaxmoe.config_file import load_config\n"
        "def get_config():\n    o = OptimConfig(lr=1.0)\n"
        "    tiny = dict(vars(load_config('tiny.py')))\n    del tiny['optim'], tiny['rollout']\n"
        f"    return Config(**tiny, {field})\n"
    )
    # a process of its own: the tests' type checks would speak before Python does
    code = f"from jaxmoe.config_file import load_config; load_config({str(file)!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert f"jaxmoe.config.errors.ConfigError: {file}: {message}" in result.stderr


def test_a_config_files_bug_has_its_traceback(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def get_config():\n    return dict(a=1, **{'b': 2})(c=3)\n")
    with pytest.raises(TypeError, match="not callable"):
        load_config(str(file))
