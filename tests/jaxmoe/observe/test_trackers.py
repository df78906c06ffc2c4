# SPDX-License-Identifier: Apache-2.0
"""wandb and trackio: stand-ins for both, and the real ones offline where they are installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.observe import trackers
from jaxmoe.observe.metrics import MetricsLog

TRACKERS = ("wandb", "trackio")


class Standin:
    """A tracker's module and its run; remembers what it was told."""

    def __init__(self):
        self.begun, self.logged, self.finished, self.broken = [], [], [], False
        self.steps = []

    def init(self, **kwargs):
        self.begun.append(kwargs)
        return self

    def Settings(self, **kwargs):
        return kwargs

    def Image(self, path):
        return SimpleNamespace(path=path)

    def define_metric(self, *names, **kwargs):
        pass

    def log(self, values, step=None):
        if self.broken:
            raise OSError("no network")
        self.logged.append(values)
        self.steps.append(step)

    def finish(self, **options):
        self.finished.append(options)


@pytest.fixture
def standins(monkeypatch):
    by_name = {name: Standin() for name in TRACKERS}
    monkeypatch.setattr(trackers, "import_module", by_name.__getitem__)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name in by_name)
    return by_name


def run(folder, stage="warmup", step=0, **options):
    return MetricsLog(
        folder, stage=stage, step=step, trackers=TRACKERS, config={"seed": 7}, **options
    )


def test_both_get_config_metrics_and_plots(tmp_path, standins):
    with run(tmp_path, project="mine") as log:
        log.write("warmup", 1, {"loss": 3.0})
        log.write("rl", 2, {"reward/mean": 0.5})
        (tmp_path / "plots").mkdir()
        (tmp_path / "plots" / "overview.png").write_bytes(b"png")
    for standin in standins.values():
        assert standin.begun[0]["project"] == "mine" and standin.begun[0]["config"] == {"seed": 7}
        first, second, last = standin.logged
        is_wandb = standin is standins["wandb"]  # Trackio takes the step as an argument
        assert first == {"warmup/loss": 3.0} | ({"warmup/step": 1} if is_wandb else {})
        assert second == {"reward/mean": 0.5} | ({"step": 2} if is_wandb else {})
        assert last["plots/overview"].path == str(tmp_path / "plots" / "overview.png")
        assert standin.finished == [{"exit_code": 0} if is_wandb else {}]


def test_wandb_marks_an_interrupted_run_as_failed(tmp_path, standins):
    with pytest.raises(ZeroDivisionError), run(tmp_path):
        _ = 1 / 0
    assert standins["wandb"].finished == [{"exit_code": 1}]
    assert standins["trackio"].finished == [{}]  # its finish takes no argument


def names_of(standins):
    wandb_names, trackio_names = (
        [kwargs["name"] for kwargs in standin.begun] for standin in standins.values()
    )
    assert wandb_names == trackio_names
    return wandb_names


def test_resumed_runs_are_the_same_and_restarts_new(tmp_path, standins):
    for stage, step in (("warmup", 0), ("rl", 3), ("warmup", 0), ("rl", 0)):
        with run(tmp_path, stage, step):
            pass
    first, resumed, *restarted = names_of(standins)
    assert first == resumed and len({first, *restarted}) == 3


def test_steps_sent_twice_begin_another_run(tmp_path, standins, capsys):
    """After kill -9 a run resumes from its checkpoint, and later steps were sent before."""
    for stage, step in (("warmup", 0), ("rl", 4), ("rl", 8)):
        with run(tmp_path, stage, step) as log:
            for later in range(step + 1, 9):
                log.write("rl", later, {"loss": 1.0})
        has_line = "trackers begin another run" in capsys.readouterr().out
        assert has_line == (step == 4)
    first, repeated, resumed = names_of(standins)
    assert first != repeated == resumed


@pytest.mark.parametrize("step", [0, 4])
def test_repeats_without_trackers_leave_no_old_run(tmp_path, standins, step):
    """A later start with trackers would send these steps to the run that has them."""
    for first, last, names in ((0, 6, TRACKERS), (step, 6, ()), (6, 7, TRACKERS)):
        with MetricsLog(tmp_path, stage="rl", step=first, trackers=names) as log:
            for later in range(first + 1, last + 1):
                log.write("rl", later, {"loss": 1.0})
    first_name, second_name = names_of(standins)
    assert first_name != second_name


def test_a_broken_tracker_is_reported_once(tmp_path, standins, capsys):
    with run(tmp_path) as log:
        standins["wandb"].broken = True
        for step in (1, 2):
            log.write("rl", step, {"loss": 1.0})
    err = capsys.readouterr().err
    assert err.count("wandb logging stopped") == 1 and "no network" in err
    assert standins["trackio"].steps == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_one_that_cannot_begin_is_one_line(tmp_path, standins, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured\nmore")

    monkeypatch.setattr(standins["wandb"], "init", refuse)
    with pytest.raises(
        ConfigError, match=r"^observe.to=wandb .*api_key not configured. Try WANDB_"
    ):
        run(tmp_path)


def test_a_missing_tracker_is_named_before_any_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"observe.to=trackio .*Try pip install trackio"):
        MetricsLog(tmp_path / "run", stage="warmup", step=0, trackers=["trackio"])
    assert not (tmp_path / "run").exists()


def test_nobody_else_is_imported_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "import_module", None)
    monkeypatch.setattr(trackers, "find_spec", None)
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write("rl", 1, {"loss": 1.0})
    assert not (tmp_path / trackers.ID_FILE).exists()


@pytest.mark.parametrize("trackers_text", ["wandb", "trackio", "wandb, trackio", ""])
def test_observe_to_names_trackers(trackers_text):
    cfg = override(load_config("tiny.py"), f"observe.to={trackers_text}")
    assert cfg.observe.trackers == [name for name in TRACKERS if name in trackers_text]


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="observe.to must be wandb, trackio, or both"):
        override(load_config("tiny.py"), "observe.to=mlflow")


SCRIPT = """
import sys
from pathlib import Path
from jaxmoe.observe.metrics import MetricsLog
from jaxmoe.observe.plots import plot_run
folder = Path(sys.argv[2])
for stage, step in (("warmup", 0), ("rl", 2)):
    with MetricsLog(folder, stage=stage, step=step, trackers=[sys.argv[1]],
                    config={"seed": 7}) as log:
        log.write("rl", step + 1, {"loss": 1.5, "reward/mean": 0.25})
        log.write("rl", step + 2, {"loss": 1.0, "reward/mean": 0.5})
        plot_run([], folder, panels=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_the_real_tracker_resumes_without_a_network(tmp_path, name):
    if find_spec(name) is None:
        pytest.skip(f"pip install {name}")
    env = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(tmp_path / "run")],
        env=env,
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and "no more metrics" not in result.stderr, result.stderr
    folder = tmp_path / ("run/wandb" if name == "wandb" else "trackio")
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for part in (b"reward/mean", b"seed", b"plots/overview"):
        assert part in content, (part, sorted(folder.rglob("*")))
