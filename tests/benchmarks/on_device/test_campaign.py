# SPDX-License-Identifier: Apache-2.0
"""A campaign loses no more than what broke, goes on where it was ended, and refuses in one line.

The stages are processes that import no JAX.
"""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.on_device import __main__ as command
from benchmarks.on_device import campaign, rehearsal, results
from benchmarks.on_device.campaign import Stage
from benchmarks.on_device.rehearsal import FAULTS
from benchmarks.on_device.stages import CAMPAIGNS, GPU
from pallas_kernels.check.child import NoChip

CHIP = {"platform": "cpu", "kind": "cpu", "driver": "none", "jax": "0"}
QUICK = Stage("quick", ("timeit", "-n", "1", "-r", "1", "pass"), 30)
SLOW = Stage("slow", (FAULTS, "hang"), 60)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A rehearsal of these stages in `tmp_path`; the exit status."""
    monkeypatch.setattr(command, "find_chip", lambda: CHIP)
    monkeypatch.setattr(command, "query_card", lambda: "")

    def run(*stages, arguments=(), commit="one"):
        monkeypatch.setattr(command, "REHEARSAL", stages)
        return command.main(["--rehearse", "--out", str(tmp_path), "--commit", commit, *arguments])

    return run


def read(folder):
    return {x["stage"]: x for x in results.load_records(folder / "results.jsonl")}


def test_broken_stages_cost_only_themselves_and_keep_messages(call, tmp_path):
    broken = (
        Stage("hangs", (FAULTS, "hang"), 1),
        Stage("dies", (FAULTS, "die"), 30),
        Stage("fills", (FAULTS, "fill"), 30, memory_gb=0.2),
        Stage("fails", (FAULTS, "fail"), 30, environment=(("A_NAME", "two words"),)),
    )
    start = time.monotonic()
    assert call(*broken, QUICK, arguments=("--together", "3")) == 1
    assert time.monotonic() - start < 25, "a stage must not wait for another's limit"
    figures = read(tmp_path)
    assert {name: (x["status"], x["message"]) for name, x in figures.items()} == {
        "hangs": ("timed out", "gave no end in 1 s"),
        "dies": ("failed", "killed by signal 9"),
        "fills": ("out of memory", "host memory above 0.2 GB"),
        "fails": ("failed", "it must not be so"),
        "quick": ("done", ""),
    }
    assert figures["fails"]["figures"] == [{"step": 1}]
    assert figures["fails"]["command"] == f"A_NAME='two words' python -m {FAULTS} fail"
    assert "it must not be so" in (tmp_path / "outputs.txt").read_text()


def test_a_rehearsal_ends_well_if_broken_stages_break(call, tmp_path, capsys):
    dies = Stage("dies", (FAULTS, "die"), 30, expected="failed")
    assert call(dies, QUICK) == 0
    assert call(dies, QUICK) == 0
    assert "0 stages to do, 2 done before" in capsys.readouterr().out
    unharmed = Stage("unharmed", QUICK.command, 30, expected="timed out")
    assert call(dies, unharmed) == 1
    assert "1 of 2 stages done" in (out := capsys.readouterr().out) and out.endswith("unharmed\n")
    assert [x.expected for x in rehearsal.REHEARSAL if x.command[0] == FAULTS] == [
        "timed out",
        "failed",
        "failed",
        "out of memory",
    ]


def test_a_second_call_skips_what_is_done(call, tmp_path, capsys):
    in_turn = ("--together", "1")
    assert call(QUICK, Stage("other", (FAULTS, "fail"), 30), arguments=in_turn) == 1
    assert call(QUICK, Stage("other", QUICK.command, 30), arguments=in_turn) == 0
    lines = results.load_records(tmp_path / "results.jsonl")
    assert [(x["stage"], x["status"]) for x in lines] == [
        ("quick", "done"),
        ("other", "failed"),
        ("other", "done"),
    ]
    assert "1 stages to do, 1 done before" in capsys.readouterr().out


def test_running_stages_are_cut_off_at_the_end(call, tmp_path):
    arguments = ("--minutes", "0.01", "--together", "1")
    assert call(SLOW, QUICK, arguments=arguments) == 1
    assert read(tmp_path)["slow"]["message"] == "the campaign's time was over"
    assert read(tmp_path).keys() == {"slow"}


# The campaign as a process that can be killed: its first stage is done, its second hangs.
KILLED = """
import sys
from benchmarks.on_device import __main__ as command
from benchmarks.on_device.campaign import Stage
command.find_chip = lambda: {"platform": "cpu", "kind": "cpu", "driver": "none", "jax": "0"}
command.REHEARSAL = (
    Stage("quick", ("timeit", "-n", "1", "-r", "1", "pass"), 30),
    Stage("slow", ("benchmarks.on_device.rehearsal", "hang"), 60),
)
command.main(["--rehearse", "--out", sys.argv[1], "--commit", "one", "--together", "1"])
"""


def test_a_killed_campaign_loses_only_what_ran(call, tmp_path):
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        text=True,
        env=environ,
        stdout=subprocess.PIPE,
    ) as killed:
        assert killed.stdout
        for line in killed.stdout:
            if line.endswith("begins slow\n"):
                break
        # The line is printed before the stage's process has its command.
        running, end = [], time.monotonic() + 60
        while not running and time.monotonic() < end:
            running = [x for x in psutil.Process(killed.pid).children() if "hang" in x.cmdline()]
        killed.send_signal(signal.SIGKILL)
    assert len(running) == 1
    _, alive = psutil.wait_procs(running, timeout=5)
    for process in alive:
        process.kill()
    assert not alive, "a stage must end with its campaign"
    assert read(tmp_path).keys() == {"quick"}
    path = tmp_path / "results.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + content[: len(content) // 2])
    mended = Stage("slow", QUICK.command, 30)
    assert call(QUICK, mended) == 0
    assert path.read_bytes().startswith(content)
    assert [x["stage"] for x in results.load_records(path)] == ["quick", "slow"]


@pytest.mark.parametrize("cut", [1, 5, 12, -2, -1])
def test_a_record_without_an_end_is_dropped(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    record = dict.fromkeys(results.FIELDS, "x")
    for name in "ab":
        results.append_record(path, record | {"stage": name})
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    path.write_bytes(content[: first + cut if cut > 0 else cut])
    names = ["a", "b"] if cut == -1 else ["a"]  # only the end of the line is missing
    assert [x["stage"] for x in results.load_records(path)] == names
    results.drop_half_record(path)
    results.append_record(path, record | {"stage": "c"})
    assert [x["stage"] for x in results.load_records(path)] == [*names, "c"]


def test_results_of_another_commit_do_not_count(call, tmp_path, capsys):
    assert call(QUICK, commit="old") == 0
    path = tmp_path / "results.jsonl"
    other = results.load_records(path)[0] | {"chip": "H100", "commit": "one"}
    results.append_record(path, other)
    capsys.readouterr()
    assert call(QUICK) == 0
    out = capsys.readouterr().out
    assert "results of one on H100, old on cpu are kept and do not count here" in out
    assert "1 stages to do, 0 done before" in out
    assert len(results.load_records(path)) == 3
    assert call(QUICK, commit="new", arguments=("--counts", "old")) == 0
    assert "0 stages to do, 1 done before" in capsys.readouterr().out
    elsewhere = ("--out", str(tmp_path / "new"), "--done", str(path))
    assert call(QUICK, arguments=elsewhere) == 0
    assert "0 stages to do, 1 done before" in capsys.readouterr().out


def test_a_later_phase_waits_for_the_earlier(tmp_path):
    lines = []
    stages = (
        Stage("long", ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(0.8)"), 30),
        QUICK,
        Stage("later", QUICK.command, 30, phase=1),
        Stage("beside", QUICK.command, 30, phase=1),
    )
    campaign.run_campaign(
        stages,
        folder=tmp_path,
        seconds=60,
        together=3,
        save=lambda *_: None,
        log_line=lambda x: lines.append(x.partition(" s ")[2].partition(": done")[0]),
    )
    assert lines[:2] == ["begins long", "begins quick"] and set(lines[2:4]) == {"long", "quick"}
    assert lines[4:6] == ["begins later", "begins beside"]


def test_names_of_stages_are_unique_and_name_files():
    for stages in (rehearsal.REHEARSAL, *CAMPAIGNS.values()):
        names = [x.name for x in stages]
        assert len(set(names)) == len(names) and not any("/" in x for x in names)


def test_simulations_have_phases_devices_and_few_stages():
    first, second = (Stage(x, (), 9, 10, 5) for x in "ab")
    later_stage = Stage("c", (), 9, 1, 1, phase=1)
    assert campaign.simulate((first, second, later_stage), 8) == [("a", 15), ("b", 20), ("c", 22)]
    assert campaign.simulate((first, second), 1) == [("a", 15), ("b", 30)]


def test_a_gpu_finishes_key_stages_in_ten_minutes():
    ends = dict(campaign.simulate(GPU, 8))
    assert ends.keys() == {x.name for x in GPU}
    kinds = ("smoke", "step_", "decode_", "pair_", "cases_")
    needed = [x.name for x in GPU if x.name.startswith(kinds) and not x.name.endswith("_tuned")]
    assert len(needed) > 25 and max(ends[x] for x in needed) < 30 * 60
    early = {x for x, second in ends.items() if second < 10 * 60}
    for kind in ("smoke", "step_", "decode_", "pair_sink_attention", "pair_grouped"):
        assert any(x.startswith(kind) for x in early), f"no {kind} within ten minutes"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--out must name a folder"),
        (("--out", "/proc/nothing/here"), "--out and --done must name results"),
        (("--out", "OUT", "--done", "OUT/text"), "text line 1 must be JSON"),
        (("--out", "OUT", "--done", "OUT/half"), "half line 1 must be JSON"),
        (("--out", "OUT", "--done", "OUT/list"), "list line 1 must have stage, status"),
        (("--out", "OUT", "--done", "OUT/bytes"), "bytes must be text"),
        (("--out", "OUT", "--minutes", "-1"), "--minutes must be above 0; got -1.0"),
        (("--out", "OUT", "--minutes", "nan"), "--minutes must be above 0; got nan"),
        (("--out", "OUT", "--together", "0"), "--together must be at least 1"),
        (("--out", "OUT", "--only", "smok"), "--only must be one of smoke, "),
        (("--out", "OUT", "--campaign", "tpu"), "invalid choice: 'tpu'"),
        (("--out", "OUT"), "the device must be a gpu; JAX finds a cpu. Type --rehearse"),
        (("--out", "OUT", "--none"), "a GPU must be there: no device. Type --rehearse"),
        (("--out", "OUT", "--ampere"), "the card must be a Hopper GPU, whose kernels the stages"),
        (("--compile", "h20"), "--compile must be one of h100, h200"),
    ],
)
def test_what_cannot_begin_is_refused_in_one_line(
    monkeypatch, tmp_path, capsys, arguments, message
):
    (tmp_path / "text").write_text("not JSON\n")
    (tmp_path / "half").write_text('{"other": ')
    (tmp_path / "list").write_text("[1, 2]\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")

    def find_nothing():
        raise NoChip("no device")

    ampere = {**CHIP, "platform": "gpu", "kind": "NVIDIA A100-SXM4-80GB"}
    chips = {"--none": find_nothing, "--ampere": lambda: ampere}
    chip = next((chips[x] for x in arguments if x in chips), lambda: CHIP)
    monkeypatch.setattr(command, "find_chip", chip)
    typed = [x.replace("OUT", str(tmp_path)) for x in arguments if x not in chips]
    with pytest.raises(SystemExit) as stopped:
        command.main(typed)
    out, error = capsys.readouterr()
    assert stopped.value.code == 2 and message in error and out == ""
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "outputs.txt").exists()


def test_stages_are_compiled_for_a_card_in_turn(monkeypatch, capfd):
    """A stage's own program is asked; here one that takes the flag and one that does not."""
    compiled = Stage("compiled", (FAULTS, "compile"), 60)
    refused = Stage("refused", ("timeit", "--no-such-flag"), 60)
    monkeypatch.setattr(command, "COMPILABLE", (FAULTS, "timeit"))
    assert command.compile_stages([compiled], "h200") == 0
    assert "compiled for h200" in capfd.readouterr().out
    assert command.compile_stages([compiled, refused], "h200") == 1
    assert "not compiled for h200: refused" in capfd.readouterr().out


def test_a_simulation_is_printed_by_the_command(capsys):
    assert command.main(["--simulate", "--only", "smoke"]) == 0
    assert capsys.readouterr().out == "  0.9 min  smoke\n"
