# SPDX-License-Identifier: Apache-2.0
"""Runs whose environment replaces the context in each turn, by the page's example."""

from pathlib import Path

import pytest

from tests.jaxmoe.tool_runs import run_tools

pytestmark = pytest.mark.slow  # commands, half a minute each; most of it compiling

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NOTES = {
    "data__environment": "notes_environment:AddNumbers(parts=3)",
    "data__tools": "",
    "data__template": "harmony",
    "data__max_prompt_tokens": 320,
    "warmup__demonstrations": "notes_environment:demonstrate",
    "rollout__max_turns": 3,
    "rollout__max_turn_tokens": 24,
    "rollout__max_new_tokens": 72,
    "rollout__max_context": 400,
    "rollout__max_episode_tokens": 1056,
    "rollout__max_reply_tokens": 0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model__numerics": "invariant",
            "optim__share_prompts": "on",
            "optim__tokens_per_microbatch": 2112,
            "loss__advantages": "turn_return_advantages",
        },
        pytest.param(
            {
                "router__replay": "R3",
                "optim__share_prompts": "on",
                "optim__tokens_per_microbatch": 2112,
            },
            marks=pytest.mark.extended,
        ),
        pytest.param(
            {
                "rollout__schedule": "groups",
                "rollout__max_staleness": 1,
                "rollout__native__on_weight_sync": "recompute",
                "loss__rollout_correction": "token_is",
            },
            marks=pytest.mark.extended,
        ),
    ],
    ids=["invariant", "replay", "groups"],
)
def test_trainer_and_engine_agree_about_new_contexts(tmp_path, changes):
    environ = {"PYTHONPATH": str(EXAMPLES)}
    run = run_tools(tmp_path / "run", environ=environ, **NOTES | changes)
    assert len(run.steps) == 2
    rollouts = [r for batch in run.sampled for r in batch if len(r.context_starts) == 2]
    assert rollouts and all(len(r.turns) == 3 for r in rollouts)
    for row in run.steps:
        assert 1 < row["contexts/mean"] <= row["contexts/max"] == 3
        assert row["turns/max"] == 3 and row["grad/norm"] > 0
    row, is_exact = run.steps[0], "model__numerics" in changes
    assert row["train_rollout_logprob_abs_diff_max"] <= (0 if is_exact else 1e-5)
    if "optim__share_prompts" in changes:
        # The prompt's tokens, once for four samples and three contexts of each.
        assert row["batch/computed_tokens_frac"] < 0.6
    if "router__replay" in changes:
        assert row["router/unknown_experts_frac"] == 0
