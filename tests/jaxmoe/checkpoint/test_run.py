# SPDX-License-Identifier: Apache-2.0
"""A run's position comes back whole, and only into the run it came from."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from jaxmoe.checkpoint import run
from jaxmoe.checkpoint.run import (
    Position,
    initial_params,
    lock_run_folder,
    record_config,
    restore_policy,
    restore_run,
    save_run,
)
from jaxmoe.checkpoint.same_run import BLOCK_BYTES, weights_digest
from jaxmoe.config import Config, ConfigError, DataConfig, OptimConfig, RolloutConfig, to_json
from jaxmoe.config_file import override
from jaxmoe.model import tiny
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.state import Frozen, Trained, init_rl_state, init_state, stage_shapes

CFG = Config(
    model=tiny(d_model=16, d_expert=24, n_experts=3),
    data=DataConfig(task="reasoning_gym:spell_backward"),
    rollout=RolloutConfig(sequences_per_step=4, samples_per_prompt=2, max_new_tokens=8),
    optim=OptimConfig(lr=1e-3),
    steps=5,
)
TX = make_optimizer(CFG.optim, steps=CFG.steps)
SHAPES = stage_shapes(CFG, TX, TX)


def bits_of(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_a_new_folder_has_no_position(tmp_path):
    assert restore_run(tmp_path, CFG, SHAPES) is None


@pytest.mark.parametrize("inside", [".", "run", "some/run"])
def test_a_file_is_no_run_folder(tmp_path, inside):
    (tmp_path / "file").write_text("notes")
    with pytest.raises(ConfigError, match=r"workdir \(.*file.* is a file\. Try --workdir "):
        restore_run(tmp_path / "file" / inside, CFG, SHAPES)


def test_a_run_folder_must_take_files(tmp_path, monkeypatch):
    monkeypatch.setattr(run.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written to. Try --workdir "):
        restore_run(tmp_path / "new", CFG, SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("kl", [False, True])
def test_a_position_comes_back_whole(tmp_path, capfd, kl):
    critic = ("critic.backbone=own", "loss.advantages=gae") * kl
    cfg = override(CFG, f"loss.kl_coef={0.1 * kl}", *critic)
    state = init_rl_state(initial_params(cfg), cfg, TX)
    if kl:
        reference = jax.tree.map(lambda x: x + 1, state.frozen.reference)
        state = replace(state, frozen=Frozen(reference))
    save_run(tmp_path, cfg, Position("rl", 3, state, {"epoch": 2}))
    position = restore_run(tmp_path, cfg, stage_shapes(cfg, TX, TX))
    assert position is not None
    assert (position.stage, position.step, position.data) == ("rl", 3, {"epoch": 2})
    assert bits_of(position.state) == bits_of(state)
    assert (position.state.frozen.reference is not None) == kl
    output = capfd.readouterr()
    assert "Metadata file does not exist" not in output.err + output.out
    assert output.err == "" and "after rl step 3" in output.out


def test_moments_may_move_between_host_and_device(tmp_path):
    host_cfg = override(CFG, "optim.moments=host")
    shapes, state = stage_shapes(host_cfg, TX, TX), init_state(Trained(initial_params(CFG)), TX)
    moved = jax.device_put(state, jax.tree.map(lambda x: x.sharding, shapes["warmup"]))
    for cfg, saved_state, new_cfg, new_shapes, kind in (
        (host_cfg, moved, CFG, SHAPES, "device"),
        (CFG, state, host_cfg, shapes, "pinned_host"),
    ):
        save_run(tmp_path / kind, cfg, Position("rl", 3, saved_state, {}))
        position = restore_run(tmp_path / kind, new_cfg, new_shapes)
        assert position is not None and bits_of(position.state) == bits_of(state)
        moments = jax.tree.leaves(position.state.opt_state)
        memory_kinds = {x.sharding.memory_kind for x in moments if x.ndim}
        assert memory_kinds == {kind}


def test_a_checkpoint_of_one_part_is_refused(tmp_path):
    saved(tmp_path)
    (tmp_path / "checkpoints" / "1000003" / "policy").rename(
        tmp_path / "checkpoints" / "1000003" / "state"
    )
    for restore in (lambda: restore_run(tmp_path, CFG, SHAPES), lambda: used(tmp_path, CFG)):
        with pytest.raises(ConfigError, match="an earlier version of jaxmoe. Try a new --workdir"):
            restore()


def test_another_optimizer_is_blamed_by_its_name(folder):
    shapes = stage_shapes(CFG, optax.sgd(0.1), optax.sgd(0.1))
    with pytest.raises(ConfigError) as error:
        restore_run(folder, CFG, shapes)
    message = str(error.value)
    assert "must fit the run's optimizer: optimizer/state/1/0/count" in message
    assert "--set optim.name=MODULE:FUNCTION" in message and "\n" not in message
    assert bits_of(used(folder, CFG).params) == bits_of(initial_params(CFG))


def test_the_policy_is_read_without_the_other_parts(tmp_path):
    cfg = override(CFG, "optim.trainable=(?!.*router).*")
    state = init_state(Trained(initial_params(cfg)), TX, trainable=cfg.trainable)
    save_run(tmp_path, cfg, Position("warmup", 3, state, {}))
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "optimizer")
    policy = used(tmp_path, CFG)  # which parameters train is no matter
    assert policy is not None and (policy.stage, policy.step, policy.rl_step) == ("warmup", 3, 0)
    assert bits_of(policy.params) == bits_of(initial_params(cfg))
    with pytest.raises(ConfigError, match="optimizer is missing"):
        restore_run(tmp_path, cfg, stage_shapes(cfg, TX, TX))


def test_rl_comes_after_the_warm_start(tmp_path):
    state = init_state(Trained(initial_params(CFG)), TX)
    save_run(tmp_path, CFG, Position("warmup", 900, state, {}))
    save_run(tmp_path, CFG, Position("rl", 1, state, {}))
    position = restore_run(tmp_path, CFG, SHAPES)
    assert position is not None and position.stage == "rl"


@pytest.mark.parametrize(
    "change",
    ["optim.name=muon", "optim.beta2=0.5", "seed=4", "loss.kl_coef=0.5", "data.options.a=1"],
)
def test_a_config_that_changes_numbers_is_refused(folder, change):
    with pytest.raises(ConfigError, match=change.split("=")[0]):
        restore_run(folder, override(CFG, change), SHAPES)


def used(work, cfg, contents=None):
    return restore_policy(work, cfg, None, contents=contents)


def saved(work, cfg=CFG):
    save_run(work, cfg, Position("rl", 3, init_state(Trained(initial_params(cfg)), TX), {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of CFG, for tests that only read it."""
    folder = tmp_path_factory.mktemp("run")
    saved(folder)
    return folder


def test_what_may_change_is_told(folder, capsys):
    bookkeeping = "save.keep=1", "eval.every_steps=2", "workdir=elsewhere"
    lower = override(CFG, "optim.lr=1e-5", "optim.clip_norm=0.5", "steps=9", *bookkeeping)
    assert restore_run(folder, lower, SHAPES) is not None
    output = capsys.readouterr().out
    for change in (
        "optim.lr=1e-05 (was 0.001)",
        "optim.clip_norm=0.5 (was 1.0)",
        "steps=9 (was 5)",
    ):
        assert change in output


def test_the_number_of_steps_is_fixed_under_decay(tmp_path):
    decays = override(CFG, "optim.lr_end_fraction=0.1")
    saved(tmp_path, decays)
    with pytest.raises(ConfigError, match=r"steps=5; .* decays over them\). Try --set steps=5,"):
        restore_run(tmp_path, override(decays, "steps=9"), SHAPES)


@pytest.mark.parametrize("change", ["loss.objective=dapo_terms(low=0.2, high=0.3)", "seed=4"])
def test_the_advice_can_be_typed_into_a_shell(tmp_path, change):
    cfg = override(CFG, change)
    saved(tmp_path, cfg)
    with pytest.raises(ConfigError) as error:
        restore_run(tmp_path, CFG, SHAPES)
    advice = re.search("Try --set (.*), or a new --workdir", str(error.value))
    assert advice is not None
    (typed,) = shlex.split(advice[1])
    assert restore_run(tmp_path, override(CFG, typed), SHAPES) is not None


def test_a_field_absent_from_checkpoints_has_its_default(tmp_path, monkeypatch):
    record = json.loads(to_json(CFG))
    del record["rollout"]["max_staleness"]
    record["rollout"]["gone_since"] = 3
    monkeypatch.setattr(run, "to_json", lambda cfg: json.dumps(record))
    saved(tmp_path)
    assert restore_run(tmp_path, CFG, SHAPES) is not None
    with pytest.raises(ConfigError, match="rollout.max_staleness=0; it cannot continue with 2"):
        ahead = override(CFG, "rollout.max_staleness=2", "loss.rollout_correction=token_is")
        restore_run(tmp_path, ahead, SHAPES)


def test_a_run_that_drops_prompts_fixes_their_limit(tmp_path):
    """Else other rows would be trained on, and some of these would count as held out."""
    drops = override(CFG, "data.overlong_prompts=drop")
    saved(tmp_path, drops)
    shorter = override(drops, "data.max_prompt_tokens=50")
    for read in (used, lambda work, cfg: restore_run(work, cfg, SHAPES)):
        with pytest.raises(ConfigError, match="data.max_prompt_tokens=512"):
            read(tmp_path, shorter)
        with pytest.raises(ConfigError, match="data.overlong_prompts=drop"):
            read(tmp_path, CFG)


@pytest.mark.parametrize(
    "change, refused",
    [
        ("seed=1", True),
        ("data.held_out_rows=512", True),
        ("data.train_rows=9", True),
        ("data.options.min_word_len=3", True),
        ("model.sliding_window=2", True),
        ("model.dtype=bfloat16", False),
        ("rollout.temperature=0.5", False),
        ("data.task=reasoning_gym:other", False),
    ],
)
def test_a_checkpoint_is_scored_on_untrained_rows(folder, change, refused):
    cfg = override(CFG, change)
    if not refused:
        assert used(folder, cfg) is not None
        return
    with pytest.raises(ConfigError, match=change.partition("=")[0]):
        used(folder, cfg)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    code = "from jaxmoe.checkpoint.run import lock_run_folder; from pathlib import Path\n"
    code += f"with lock_run_folder(Path({str(tmp_path)!r})): print('in', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "in\n"
        with pytest.raises(ConfigError, match="another process trains in it. Wait for it, or try"):
            with lock_run_folder(tmp_path):
                pass
        with pytest.raises(ConfigError, match="another process trains in it"):
            restore_run(tmp_path, CFG, SHAPES)
        used(tmp_path, CFG)  # it may be scored meanwhile
        process.kill()
        process.wait()
    with lock_run_folder(tmp_path):  # what a killed one leaves is nothing
        pass


def test_the_same_seed_gives_the_same_first_weights():
    other_params = initial_params(override(CFG, "seed=1"))
    assert bits_of(initial_params(CFG)) == bits_of(initial_params(CFG)) != bits_of(other_params)


def test_the_run_folder_says_what_it_ran(tmp_path):
    record_config(tmp_path / "run", CFG)
    record_config(tmp_path / "run", override(CFG, "steps=9"))
    (path,) = (tmp_path / "run").iterdir()
    record = json.loads(path.read_text())
    assert path.name == "config.json" and record["config"]["steps"] == 9
    assert record["versions"]["jax"] == jax.__version__
    commit = record["git_commit"]
    assert commit is None or re.search(r"[0-9a-f]{40}(-dirty)?$", commit), commit


CUTS = (
    "optim.microbatches=2 optim.tokens_per_microbatch=4096 optim.remat=True optim.moments=host "
    "optim.share_prompts=on optim.share_prompts=off rollout.max_parallel_sequences=8"
).split()


def test_the_same_sums_may_be_cut_otherwise(folder, capsys):
    for change in CUTS:
        assert restore_run(folder, override(CFG, change), SHAPES) is not None
        assert f"{change} (was " in capsys.readouterr().out


KEYS = ["data.task", "init.tokenizer", "init.checkpoint"]


@pytest.mark.parametrize("key", KEYS)
def test_file_contents_decide_and_not_paths(tmp_path, capsys, key):
    saved_cfg, moved = override(CFG, f"{key}=here"), override(CFG, f"{key}=there")
    state = init_state(Trained(initial_params(CFG)), TX)
    save_run(tmp_path, saved_cfg, Position("rl", 3, state, {}), {key: "c0ffee"})
    assert restore_run(tmp_path, moved, SHAPES, contents={key: "c0ffee"}) is not None
    assert f"{key}=there (was here, with the same contents)" in capsys.readouterr().out
    for cfg in (saved_cfg, moved):  # edited where it is, or another file
        with pytest.raises(ConfigError, match=f"{key} had other .* was c0ffee, and is now decaf"):
            restore_run(tmp_path, cfg, SHAPES, contents={key: "decaf"})
    with pytest.raises(ConfigError, match=f"{key}=here; it cannot continue with there"):
        restore_run(tmp_path, moved, SHAPES)  # nobody can tell


def test_a_moved_file_is_the_same_task(tmp_path):
    saved_cfg, key = override(CFG, "data.task=here"), "data.task"
    state = init_state(Trained(initial_params(CFG)), TX)
    save_run(tmp_path, saved_cfg, Position("rl", 3, state, {}), {key: "c0ffee"})

    def scored(cfg, digest):
        return used(tmp_path, cfg, {key: digest})

    moved = override(CFG, "data.task=there")
    assert scored(moved, "c0ffee") is not None and scored(moved, "decaf") is not None
    with pytest.raises(ConfigError, match="seed=0; it cannot be evaluated with 1"):
        scored(override(moved, "seed=1"), "c0ffee")
    with pytest.raises(ConfigError, match="data.task had other contents"):
        scored(saved_cfg, "decaf")


def test_a_few_bytes_distinguish_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 * BLOCK_BYTES))
    first = weights_digest(tmp_path)
    file.write_bytes(bytes(2 * BLOCK_BYTES) + b"1" + bytes(BLOCK_BYTES - 1))
    assert weights_digest(tmp_path) != first
