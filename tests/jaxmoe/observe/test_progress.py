# SPDX-License-Identifier: Apache-2.0
"""The progress line: plain lines off a terminal, a bar on one, and an honest time left."""

from io import StringIO

from rich.console import Console

from jaxmoe.observe.progress import Progress, report_phase


def _plain() -> tuple[StringIO, Console]:
    out = StringIO()
    return out, Console(file=out, force_terminal=False, width=120)


def test_plain_lines_are_the_first_and_the_last():
    out, console = _plain()
    with Progress(60, "rl", console=console) as progress:
        for step in range(1, 61):
            progress.update(step, reward=0.531, engine_gap=1.2e-6, tokens_per_s=4210.0)
    first, last = out.getvalue().splitlines()
    assert first == "rl      1/60  reward 0.531  engine gap 1.2e-06  4,210 tok/s"
    assert last.startswith("rl      60/60  ") and last.endswith("0 s left")


def test_a_run_stopped_early_shows_its_last_step():
    out, console = _plain()
    with Progress(60, "rl", console=console) as progress:
        for step in (1, 2, 3):
            progress.update(step, reward=0.5)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/60", "3/60"]


def test_remaining_seconds_are_median_step_times_remaining_steps(monkeypatch):
    out, console = _plain()
    clock = iter([0.0, 90.0, 100.0, 110.0, 150.0])  # the first step compiles, the last one stalls
    monkeypatch.setattr("jaxmoe.observe.progress.time.perf_counter", lambda: next(clock))
    with Progress(7, "rl", console=console) as progress:
        for step in (1, 2, 3, 4):
            progress.update(step)
    lines = [line.partition("/7")[2].strip() for line in out.getvalue().splitlines()]
    assert lines == ["", "50 s left", "40 s left", "30 s left"]


def test_a_terminal_shows_the_bar_and_the_notes():
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(5, "rl", console=console) as progress:
        progress.update(1, reward=0.25)
        progress.note("saved [red] step 1")
    assert "saved [red] step 1" in out.getvalue()
    assert "1/5" in out.getvalue() and "reward 0.250" in out.getvalue()


def test_a_phase_says_how_long_it_took(capsys):
    with report_phase("compiling the train step"):
        pass
    assert capsys.readouterr().out == "compiling the train step… 0.0 s\n"


def _alerting(*steps: dict[str, str], console: Console) -> None:
    with Progress(len(steps), "rl", console=console) as progress:
        for step, raised in enumerate(steps, start=1):
            progress.alert(step, raised)
            progress.update(step, reward=0.5)


def test_a_lasting_alert_is_printed_once():
    out, console = _plain()
    high, low = {"kl": "kl is 0.2"}, {}
    _alerting(high, high, low, low, high, console=console)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("!")]
    assert lines == ["! step 1: kl is 0.2", "! step 5: kl is 0.2"]


def test_a_new_alert_is_printed_without_lasting_ones():
    out, console = _plain()
    one_alert, three_alerts = {"b": "b is bad"}, {"b": "b is bad", "c": "c is bad", "a": "a is bad"}
    _alerting(one_alert, three_alerts, three_alerts, {"a": "a is worse"}, console=console)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("!")]
    assert lines == ["! step 1: b is bad", "! step 2: a is bad", "! step 2: c is bad"]


def test_the_count_of_lasting_alerts_is_shown(monkeypatch):
    monkeypatch.setattr("jaxmoe.observe.progress.PLAIN_INTERVAL_S", 0.0)
    out, console = _plain()
    _alerting({"a": "a is bad"}, {"a": "a is bad", "b": "b is bad"}, {}, console=console)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("rl")]
    assert lines[0] == "rl      1/3  ! 1  reward 0.500"
    assert lines[1].startswith("rl      2/3  ! 2  reward 0.500  ")
    assert lines[2].startswith("rl      3/3  reward 0.500  ")


def test_an_alert_stays_above_the_bar_as_written():
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    _alerting({"a": "a is 0.5 (outside [0, 0.4])"}, console=console)
    assert "! step 1: a is 0.5 (outside [0, 0.4])\n" in out.getvalue().replace("\r", "")
    assert "! 1  reward 0.500" in out.getvalue()


def test_long_work_within_a_step_shows_its_count(monkeypatch):
    out, console = _plain()
    clock = [100.0]
    monkeypatch.setattr("jaxmoe.observe.progress.time.perf_counter", lambda: clock[0])
    with Progress(5, "rl", step=2, console=console) as progress:
        for i in range(16):  # half a second each
            progress.report("scoring", i, 16)
            clock[0] += 0.5
        progress.update(3)
        assert progress.format_activity() == ""
        progress.report("train")
        clock[0] += 1.9
        assert progress.format_activity() == ""  # what is quick is not told
        clock[0] += 0.2
        assert progress.format_activity() == "train, 2 s"
    first, second, *_ = out.getvalue().splitlines()
    assert first == "rl      2/5  scoring 4/16, 2 s"
    assert second == "rl      2/5  scoring 14/16, 7 s"


def test_a_terminal_shows_current_work_and_the_bar():
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(5, "rl", console=console) as progress:
        progress._activity = "scoring [red]", -1e9, 3, 16
        progress._bar.refresh()
    assert "scoring [red] 3/16" in out.getvalue()
