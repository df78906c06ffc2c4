# SPDX-License-Identifier: Apache-2.0
"""The reward for followed instructions, in its process, and of a file with IFEval's columns."""

import json

import pytest
from scripted import Run, Scripted, lines

from jaxmoe import train
from jaxmoe.collection import tasks
from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.graders.instructions import score_instructions
from jaxmoe.graders.instructions.reward import check_reward, read_instructions
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.reward_process import RewardProcess
from jaxmoe.rewards.rewards import mean_part_metrics, read_rewards, score_samples
from tests.jaxmoe.graders.instructions.package import needs_package

pytestmark = needs_package
SPEC = "jaxmoe.graders.instructions:score_instructions"
COLUMNS = {
    "instruction_id_list": ["startend:quotation", "punctuation:no_comma"],
    "kwargs": [{}, {"num_words": None}],
}


def test_prompt_level_pays_all_and_instruction_level_shares():
    for text, prompt, share in (('"a b"', 1.0, 1.0), ('"a, b"', 0.0, 0.5), ("a, b", 0.0, 0.0)):
        scored = score_instructions(text, COLUMNS)
        assert (scored["score"], scored["instruction_level"]) == (prompt, share)
        assert scored["prompt_level"] == prompt and scored["checker_errors"] == 0.0
        assert score_instructions(text, COLUMNS, reward="instruction_level")["score"] == share
    assert score_instructions('"a, b"', COLUMNS)["punctuation/no_comma"] == 0.0


def test_columns_may_be_json_text_and_lack_kwargs():
    as_text = {name: json.dumps(value) for name, value in COLUMNS.items()}
    assert read_instructions(as_text) == read_instructions(COLUMNS)
    inner = COLUMNS | {"kwargs": ["{}", "null"]}
    assert score_instructions('"a"', inner) == score_instructions('"a"', COLUMNS)
    assert len(read_instructions({"instruction_id_list": ["punctuation:no_comma"]})) == 1


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": "punctuation:no_comma"},
        COLUMNS | {"kwargs": [{}]},
        COLUMNS | {"kwargs": [1, 2]},
        COLUMNS | {"kwargs": "oops"},
        COLUMNS | {"instruction_id_list": [1, 2]},
    ],
)
def test_rows_without_instructions_are_refused_before_the_run(columns):
    with pytest.raises(ConfigError, match="q.jsonl:3: score_instructions must have rows with"):
        check_reward([Row("a", "b", columns=columns, location="q.jsonl:3")])


def test_parts_are_logged_and_failing_checkers_are_counted():
    columns = COLUMNS | {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}
    rewards = read_rewards(SPEC, list(columns))
    texts = ["[" * 20_000, "[1]", "", "{"]
    samples = [
        Sample(i, Row("a", None, columns=columns), ParsedResponse(t), [65])
        for i, t in enumerate(texts)
    ]
    process = RewardProcess(60.0)
    scores = score_samples(rewards, samples, run=process)
    process.close()
    assert scores.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
    metrics = mean_part_metrics(scores.parts)
    assert metrics["reward/score_instructions/checker_errors/mean"] == 0.25
    assert metrics["reward/score_instructions/prompt_level/mean"] == 0.25
    assert metrics["reward/score_instructions/detectable_format/json_format/mean"] == 0.25


def test_rows_with_instructions_log_both_levels(tmp_path):
    rows = [{"prompt": f"Say {i}.", **COLUMNS} for i in range(80)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = (f"data.task={tmp_path / 'q.jsonl'}", "data.options={}", f"data.rewards={SPEC}")
    Run(tmp_path / "run", Scripted(), changes=changes)()
    for row in lines(tmp_path / "run")[1:]:
        assert row["reward/score_instructions/punctuation/no_comma/mean"] == 1.0
        assert row["reward/score_instructions/instruction_level/mean"] == 0.5
        assert row["reward/mean"] == row["reward/score_instructions/prompt_level/mean"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"data.rewards={SPEC}"], "row 0: score_instructions must have rows with"),
        ([f"data.rewards={SPEC}(reward='both')"], "must be prompt_level or instruction_level"),
        (
            ["data.map_rows=jaxmoe.graders.instructions:add_instruction"],
            "Did you mean jaxmoe.graders.instructions:add_instructions?",
        ),
        (
            ["data.map_rows=jaxmoe.graders.instructions:add_instructions(types=['startend:end'])"],
            "Did you mean startend:end_checker?",
        ),
        (
            ["data.map_rows=jaxmoe.graders.instructions:add_instructions(type=[])"],
            "Did you mean types?",
        ),
    ],
)
def test_mistakes_are_one_line_before_work_starts(changes, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)
    command = ["--config", "tiny.py", "--workdir", str(tmp_path / "run")]
    command += [x for change in changes for x in ("--set", change)]
    assert train.main(command) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
