# SPDX-License-Identifier: Apache-2.0
"""The beds of the four-bit study: the released start, what each contender reads, and the tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model.rounded import MATRICES, decode_experts, round_experts
from jaxmoe.study import Contender
from studies import mxfp4_bed, mxfp4_trained
from studies.__main__ import main
from studies.bed import train_warm_start
from studies.mxfp4_bed import (
    MXFP4_BEDS,
    Mxfp4Bed,
    changed_share,
    load_released,
    make_mxfp4_programs,
    mxfp4_bed_config,
    train_on_mxfp4_bed,
)
from studies.mxfp4_trained import MXFP4_CONTENDERS
from studies.reversal import Reversal
from tests.jaxmoe.random_weights import random_weights

# Words so short that some answers are right by chance.
BED = Mxfp4Bed("reversal", Reversal(n_letters=3, length=2), warm_loss=0.0)


@pytest.fixture(scope="module")
def released():
    cfg = mxfp4_bed_config(BED.task, 1, "quant.experts=mxfp4")
    masters, _ = train_warm_start(cfg, BED.task, 0, steps=20, max_loss=0.0)
    return round_values(masters)


@pytest.fixture(scope="module")
def start():
    """Values as of a start, without its training."""
    return round_values(random_weights(mxfp4_bed_config(BED.task, 1).model, 0))


@jax.jit
def round_values(masters):
    return decode_experts(round_experts(masters), jnp.float32)


def test_only_the_word_backward_is_right():
    task = Reversal(n_letters=5, length=3)
    prompts, answers = task.sample_prompts(np.random.default_rng(0), 4)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert prompt.tokens == (5, *answer[::-1].tolist(), 6)
        assert len(prompt.tokens) == task.prompt_tokens and task.vocab_size == 7


def test_the_start_has_four_bit_values(start):
    decoded = round_values(start)
    for kind in ("sliding", "full"):
        for name in MATRICES:
            np.testing.assert_array_equal(
                decoded["layers"][kind][name], start["layers"][kind][name]
            )


def test_beds_of_equal_task_share_warm_starts(tmp_path, monkeypatch):
    folders = []

    def load(cfg, task, seed, folder, *, steps, max_loss):
        folders.append(folder.name)
        return {}

    monkeypatch.setattr(mxfp4_bed, "round_experts", lambda masters: masters)
    monkeypatch.setattr(mxfp4_bed, "decode_experts", lambda packed, dtype: packed)
    monkeypatch.setattr(mxfp4_bed, "load_warm_start", load)
    for bed in (*MXFP4_BEDS.values(), replace(MXFP4_BEDS["reversal"], name="new", warm_loss=0.5)):
        load_released(bed, 0, tmp_path)
    assert folders == ["transitions", "reversal", "reversal", "new"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "contender", [MXFP4_CONTENDERS[i] for i in (0, 1, 5, 6)], ids=lambda c: c.name
)
def test_only_four_bit_engines_differ_from_their_trainer(released, contender):
    programs = make_mxfp4_programs(BED, mxfp4_bed_config(BED.task, 3, *contender.settings))
    metrics = train_on_mxfp4_bed(programs, 0, released, rate=0.01)
    assert (metrics["k3"] > 1e-6) == (contender.name == "four-bit engine")
    assert (metrics["moved"] == 0) == (contender.name == "LoRA on the packed base")


def test_moved_codes_are_counted_and_bases_have_none(start):
    encode = jax.jit(round_experts)
    packed = encode(start)
    assert changed_share(packed, packed) == 0.0
    negated = encode(jax.tree.map(lambda x: -x, start))
    matrices = [start["layers"][kind][name] for kind in ("sliding", "full") for name in MATRICES]
    n_zeros = sum(int(jnp.sum(x == 0)) for x in matrices)
    assert changed_share(packed, negated) == 1 - n_zeros / sum(x.size for x in matrices)


@pytest.mark.slow
def test_the_command_writes_tables_and_resumes(tmp_path, monkeypatch, capsys, released):
    contenders = [Contender(c.name, c.settings, (1e-3,)) for c in MXFP4_CONTENDERS[::5]]
    monkeypatch.setattr(mxfp4_trained, "MXFP4_CONTENDERS", contenders)
    monkeypatch.setitem(MXFP4_BEDS, "reversal", BED)
    monkeypatch.setattr(mxfp4_trained, "load_released", lambda bed, seed, folder: released)
    argv = ["mxfp4", "--beds", "reversal", "--seeds", "2", "--steps", "1", "--out", str(tmp_path)]
    with jax.numpy_dtype_promotion("standard"):
        assert main(argv) == 0
        table = (tmp_path / "mxfp4.md").read_text()
        assert "four bits on both sides" in table and (tmp_path / "mxfp4.png").stat().st_size
        assert "reversal, 4 of about 4: four bits" in capsys.readouterr().out
        assert main(argv) == 0
    assert "4 of about 4" not in capsys.readouterr().out
    assert (tmp_path / "mxfp4.md").read_text() == table


def test_a_study_of_one_seed_is_refused(tmp_path):
    assert main(["mxfp4", "--seeds", "1", "--out", str(tmp_path)]) == 2
