# SPDX-License-Identifier: Apache-2.0
"""The plan of a run with tools: its text, and the memory of its engine."""

import pytest

from jaxmoe import train
from jaxmoe.collection import tasks
from jaxmoe.config_file import load_config, override
from jaxmoe.model.cache import cache_bytes
from jaxmoe.model.ops import make_ops
from jaxmoe.rollout.engine import open_engine
from jaxmoe.run.memory import plan_memory
from tests.jaxmoe.sandbox.kinds import first_kind

CFG = load_config("tiny_tool.py")


def test_a_dry_run_names_the_tools_and_the_limits_of_an_episode(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)
    work = tmp_path / "run"
    assert train.main(["--config", "tiny_tool.py", "--workdir", str(work), "--dry-run"]) == 0
    out, r = capsys.readouterr().out, CFG.rollout
    assert f"episodes     up to {r.max_turns} turns with python: {r.max_new_tokens} sampled" in out
    assert f"up to {r.max_context} tokens" in out and not work.exists()


def test_the_engines_cache_has_a_slot_for_each_token_of_an_episode(tmp_path):
    for context in (CFG.rollout.max_context, 2 * CFG.rollout.max_context):
        cfg = override(
            CFG,
            f"rollout.max_context={context}",
            "rollout.max_parallel_sequences=64",
            "optim.tokens_per_microbatch=0",
        )
        engine = open_engine(cfg, make_ops(cfg), tmp_path)
        assert engine.slots == context == cfg.context
        engine.close()
        # 64 rows, and a copy of the 16 that continue when the others have ended.
        assert plan_memory(cfg).cache == sum(
            cache_bytes(cfg.model, rows, context) for rows in (64, 16)
        )


def scorer_with_sandbox(response: str, *, sandbox: dict[str, object] | None = None) -> float:
    """A reward function of a user that runs programs."""
    return float(bool(sandbox))


@pytest.mark.parametrize(
    "setting", [f"data.rewards={__name__}:scorer_with_sandbox", "data.tools=python_sandbox", ""]
)
def test_a_dry_run_names_the_sandbox_of_tools_and_rewards(tmp_path, capsys, monkeypatch, setting):
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)
    kind = first_kind()
    command = ["--config", "tiny_tool.py", "--workdir", str(tmp_path / "run"), "--dry-run"]
    assert train.main(command + (["--set", setting] if setting else [])) == 0
    assert (f"  sandbox      {kind}, Python 3." in capsys.readouterr().out) == bool(setting)
