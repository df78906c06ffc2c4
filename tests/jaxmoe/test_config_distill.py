# SPDX-License-Identifier: Apache-2.0
"""What a config refuses of a teacher, in one line."""

import json

import pytest

from jaxmoe.checkpoint.teacher_weights import find_teacher
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.data.tokenizer import write_byte_tokenizer
from jaxmoe.model.config import gpt_oss_120b
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.run.dry_run import format_plan
from jaxmoe.run.memory import plan_memory
from jaxmoe.run.teacher import make_teacher
from tests.jaxmoe.commands import ROOT
from tests.jaxmoe.sparse_checkpoint import write_sparse_checkpoint

CFG = load_config("tiny.py")
URL = "distill.teacher=http://127.0.0.1:1"

REFUSED = {
    "a weight without a teacher": (["distill.advantage_coef=1"], "needs a teacher"),
    "annealing without a teacher": (["distill.anneal_steps=5"], "needs a teacher"),
    "rewards scaled without a teacher": (["distill.reward_coef=0"], "needs a teacher"),
    "a negative weight": (["distill.teacher=base", "distill.reverse_kl_coef=-1"], "0 or more"),
    "the vocabulary of a server": (
        [URL, "distill.reverse_kl_coef=1"],
        "likeliest words, and not of the vocabulary. Try --set distill.top_k=20",
    ),
    "words of no teacher": (["distill.top_k=20"], "needs a teacher"),
    "words of a model": (
        ["distill.teacher=base", "distill.reverse_kl_coef=1", "distill.top_k=20"],
        r"distill.top_k \(20\) is for a server",
    ),
    "all words": (
        [URL, "distill.reverse_kl_coef=1", "distill.top_k=265"],
        r"must be below model.vocab_size \(265\)",
    ),
    "a server at another temperature": (
        [URL, "distill.advantage_coef=1", "rollout.temperature=0.7"],
        "at temperature 1",
    ),
    "no temperature": (
        ["distill.teacher=base", "distill.advantage_coef=1", "rollout.temperature=0"],
        "rollout.temperature must be above 0",
    ),
    "groups drawn again without rewards": (
        ["distill.teacher=base", "distill.advantage_coef=1", "distill.reward_coef=0"],
        "draws groups of equal rewards again",
    ),
    "a KL in a reward that has no weight": (
        ["distill.teacher=base", "distill.advantage_coef=1", "distill.reward_coef=0"]
        + ["rollout.max_gen_batches=1", "loss.kl_in=reward", "loss.kl_coef=0.1"],
        "Try --set loss.kl_in=loss",
    ),
    "a penalty in a reward that has no weight": (
        ["distill.teacher=base", "distill.advantage_coef=1", "distill.reward_coef=0"]
        + ["rollout.max_gen_batches=1", "rollout.overlong_buffer=2"],
        "Try --set rollout.overlong_buffer=0",
    ),
    "a warm start by its own weights": (
        ["distill.teacher=base", "distill.warmup_share=0.5"],
        "needs a warm start and the weights of another model",
    ),
    "a teacher of no warm start": (
        ["distill.teacher=runs/tiny", "distill.warmup_share=0.5", "warmup.steps=0"],
        "got warmup.steps=0 and distill.teacher=runs/tiny",
    ),
    "no host": (["distill.teacher=http://", "distill.advantage_coef=1"], "http://HOST:PORT"),
    "a password": (["distill.teacher=http://me:secret@host"], "must not contain a user name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_work_are_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refusal:
        override(CFG, *settings)
    assert "\n" not in str(refusal.value) and "secret" not in str(refusal.value)


def test_a_teacher_without_a_weight_is_refused():
    with pytest.raises(ConfigError, match="needs a weight in the loss"):
        algorithm_from_config(override(CFG, "distill.teacher=base"))


def test_words_without_a_divergence_are_refused():
    with pytest.raises(ConfigError, match="needs a divergence in the loss"):
        algorithm_from_config(override(CFG, URL, "distill.advantage_coef=1", "distill.top_k=5"))


def test_a_servers_words_are_part_of_the_plan():
    settings = URL, "distill.forward_kl_coef=1", "distill.top_k=5"
    cfg = override(CFG, *settings)
    assert algorithm_from_config(cfg).needs_divergences
    assert plan_memory(cfg).teacher == 8 * 5 * cfg.rollout.sequences_per_step * cfg.context
    assert "the teacher's 5 likeliest words" in format_plan(cfg, "training")


def test_a_servers_run_has_no_divergences():
    cfg = override(CFG, URL, "distill.advantage_coef=1")
    algorithm = algorithm_from_config(cfg)
    assert algorithm.needs_teacher_logp and not algorithm.needs_divergences
    algorithm = algorithm_from_config(
        override(CFG, "distill.teacher=base", "distill.forward_kl_coef=1")
    )
    assert algorithm.needs_divergences and not algorithm.needs_teacher_logp


def test_a_run_without_a_teacher_takes_nothing():
    algorithm = algorithm_from_config(CFG)
    assert not algorithm.needs_teacher_logp and not algorithm.needs_divergences
    assert make_teacher(CFG) is None and plan_memory(CFG).teacher == 0


def config_of(folder, *settings):
    return override(CFG, f"distill.teacher={folder}", "distill.advantage_coef=1", *settings)


@pytest.fixture
def folder(tmp_path):
    write_sparse_checkpoint(tmp_path, CFG.model, "bfloat16")
    write_byte_tokenizer(tmp_path)
    return tmp_path


def test_a_folder_is_a_teacher_by_its_files(folder):
    teacher = make_teacher(config_of(folder))
    assert teacher.scorer.model == CFG.model and not teacher.folder.is_packed
    assert teacher.scorer.temperature == CFG.rollout.temperature
    assert str(folder) in format_plan(config_of(folder), "training")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "there is no folder"),
        (".@3", "names a step, and . is not a run's folder"),
        ("9" * 400, "there is no folder"),
        ("\0", "there is no folder"),
    ],
)
def test_a_missing_folder_is_refused(name, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        find_teacher(config_of(name))
    assert "\n" not in str(refusal.value)


def test_adapters_alone_are_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has adapters. Export them with --merge"):
        find_teacher(config_of(folder))


def test_another_vocabulary_or_context_is_refused(folder):
    with pytest.raises(ConfigError, match="policy's vocabulary of 300 tokens"):
        find_teacher(config_of(folder, "model.vocab_size=300"))
    hf = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 20}
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match="must read sequences of 58 tokens"):
        find_teacher(config_of(folder))


def test_another_tokenizer_is_refused(folder):
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"a":97', '"a":98').replace('"b":98', '"b":97'))
    if path.read_text() == text:  # it is indented
        path.write_text(text.replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97'))
    with pytest.raises(ConfigError, match="differs: id 97 is 'b' there, and 'a' here"):
        make_teacher(config_of(folder))
    path.unlink()
    with pytest.raises(ConfigError, match="needs one to compare"):
        make_teacher(config_of(folder))


def test_the_20b_beside_a_120b_has_figures(tmp_path):
    """The header of gptoss20b_distill.py."""
    write_sparse_checkpoint(tmp_path, gpt_oss_120b())
    cfg = override(load_config("gptoss20b_distill.py"), f"distill.teacher={tmp_path}")
    mem = plan_memory(cfg)
    header = (ROOT / "configs/gptoss20b_distill.py").read_text().partition("SOURCE")[0]
    for nbytes in (mem.teacher, mem.training, mem.sampling):
        assert f"{nbytes / 1e9:.1f} GB" in header
    served = plan_memory(override(cfg, "distill.teacher=http://host:8000"))
    assert served.teacher == 0 and mem.training - mem.teacher == served.training
