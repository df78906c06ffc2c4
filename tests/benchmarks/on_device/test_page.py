# SPDX-License-Identifier: Apache-2.0
"""The page of the devices says what the records say, and the newest of them."""

import json
import re
import shlex

import pytest

from benchmarks.on_device import page, results
from benchmarks.on_device.page import format_code, format_command, format_number

STEP = {"model": "20b", "tokens": 4096, "sequences": 2}
TIMED = STEP | {"seconds": 2.5, "tokens_per_s": 3276.8, "useful_tflops": 250.4, "peak_bytes": 3e10}
PAIR = {"op": "grouped_matmul", "case": "down", "impl": "mosaic_gpu", "peer": "package:peer"}
FASTER = {
    "pass": "forward",
    "ms": 1.0,
    "peer_ms": 2.0,
    "speed": 2.0,
    "tflops": 600.0,
    "of_matmul": 0.8,
}


def make_record(stage, *figures, **fields):
    return {
        "stage": stage,
        "status": "done",
        "figures": list(figures),
        "message": "",
        "seconds": 12.3,
        "chip": "NVIDIA H100",
        "driver": "cuda 13000 NVRM 580.1.2",
        "jax": "0.11.2 0.11.2",
        "commit": "common",
        "date": "2026-01-02",
        "command": "python -m benchmarks.x",
        **fields,
    }


@pytest.fixture
def write(tmp_path, monkeypatch):
    """The page that these records make."""
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "devices.md")
    monkeypatch.setattr(page, "SCHEDULES", tmp_path / "schedules/tpu.jsonl")

    def run(*records, name="h100.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(x) + "\n" for x in records))
        assert page.main([]) == 0
        return page.PAGE.read_text()

    return run


def read_rows(text, title):
    """Lines of the table under a heading."""
    section = text.partition(f"### {title}\n")[2].partition("\n###")[0]
    lines = [x for x in section.splitlines() if x.startswith("|")]
    return [re.sub(r"\s*\|\s*", " | ", x.strip("|")).strip() for x in lines[2:]]


def test_the_page_is_what_the_records_make():
    assert page.main(["--check"]) == 0


def test_the_commands_of_the_page_can_be_typed():
    """Also those with variables that have a space in them, which tests/test_docs.py passes over."""
    commands = re.findall(r"^The first row again: `(.*)`$", page.PAGE.read_text(), re.M)
    assert len(commands) > 3
    for command in commands:
        words = shlex.split(command)
        module = words[words.index("-m") + 1]
        source = (page.ROOT / f"{module.replace('.', '/')}.py").read_text()
        for word in words[words.index("-m") + 2 :]:
            declared = re.search(rf'add_argument\(\s*"{word}"', source)
            assert declared or not word.startswith("--"), command


def test_a_page_that_differs_is_reported_and_unwritten(write, capsys):
    text = write(make_record("step_x", TIMED))
    assert page.main(["--check"]) == 0
    page.PAGE.write_text(text.replace("2.50", "2.51"))
    assert page.main(["--check"]) == 1
    assert "2.51" in page.PAGE.read_text()
    page.PAGE.unlink()
    assert page.main(["--check"]) == 1 and not page.PAGE.exists()
    assert capsys.readouterr().err.count("\n") == 2


def test_invalid_records_are_refused_in_one_line(write, capsys):
    write(make_record("step_x", TIMED))
    (page.FOLDER / "more.jsonl").write_text("text\n")
    with pytest.raises(SystemExit, match="2"):
        page.main([])
    assert (error := capsys.readouterr().err).count("\n") == 1 and "line 1 must be JSON" in error


def test_the_newest_done_record_counts_with_its_commit(write):
    compiled = STEP | {"compile_s": 71.26, "compiler_bytes": 2e10, "flags": "", "settings": ["a=1"]}
    text = write(
        make_record("step_x", STEP, TIMED, date="2026-01-05", commit="later"),
        make_record("step_x", STEP, TIMED | {"seconds": 9.0}),
        make_record("step_x", STEP, date="2026-01-06", status="failed", message="a | b `c`"),
        make_record("step_y", compiled, TIMED | {"sequences": 6}),
        make_record("decode_z", status="cut off"),
    )
    assert "commit common" in text and "580.1.2" in text and "2026-01-02, 2026-01-05" in text
    assert read_rows(text, "A step of RL") == [
        "20b, LoRA | 2 × 4,096 | tuned | 2.50 | 3,280 | 250 | – | 30.0 | – | – | – | later",
        "20b, LoRA | 6 × 4,096 | `a=1`, tuned | 2.50 | 3,280 | 250 | – | 30.0 | 20.0 | – | 71.3 |",
    ]
    assert read_rows(text, "What came to no good end") == [
        "decode_z | cut off | 12.3 |",
        "step_x | failed | 12.3 | `a / b 'c'`",
    ]
    assert "### Decoding" not in text, "a section without rows is left out"


def test_figures_of_an_ended_stage_have_a_note(write):
    errors = PAIR | {"errors": {"mosaic_gpu": [1e-3, 2e-3], "package:peer": [0.25], "x": [9.0]}}
    forward, backward = PAIR | FASTER, PAIR | FASTER | {"pass": "backward", "ms": 0.5}
    text = write(
        make_record("pair_a", errors, backward, forward, status="timed out"),
        make_record("pair_a", status="cut off"),
    )
    ends = "peer | 2.00 | 2.00× | 600 | 0.800 | 0.00200 / 0.250 | then timed out"
    assert read_rows(text, "Kernels against their peers") == [
        f"grouped_matmul | down | forward | 1.00 | {ends}",
        f"grouped_matmul | down | backward | 0.500 | {ends}",
    ]


def test_the_newest_verdict_counts_in_its_group(write):
    def judge(name, verdict, message=""):
        return {"case": name, "verdict": verdict, "message": message}

    complete = {"group": "rest", "cases": 2, "right": 1}
    text = write(
        make_record(
            "cases_real",
            judge("a", "wrong", "far off"),
            judge("b", "wrong", "row 3"),
            status="cut off",
        ),
        make_record(
            "cases_rest",
            judge("c", "right"),
            judge("d", "refused"),
            complete,
            status="failed",
            date="2026-01-03",
            commit="later",
        ),
        make_record("cases_real", judge("a", "right"), status="timed out", date="2026-01-03"),
    )
    assert read_rows(text, "The kernels' cases") == [
        "real | 1 | 1 | 0 | 0 | then timed out, cut off",
        "rest | 1 | 0 | 1 | 0 | later",
    ]
    assert "- wrong: `b`, common: `row 3`\n" in text and "far off" not in text
    assert [x.split()[0] for x in read_rows(text, "What came to no good end")] == ["cases_real"]


def test_runs_and_peers_have_gaps_and_scores(write):
    run = {
        "config": "tiny.py",
        "settings": ["wide=1", "equal=1"],
        "steps": 3,
        "status": 0,
        "largest train_rollout_logprob_abs_diff": 0.5,
        "largest train_rollout_logprob_abs_diff_max": 0.0,
        "median step_s": 1.234,
        "reward/mean, first and last": [0.0, 0.51234],
    }
    peer = {"config": "tiny.py", "settings": ["wide=1"], "status": 1}
    text = write(make_record("run_tiny", run, peer))
    assert "All have `wide=1`." in text
    assert read_rows(text, "Whole runs") == [
        "`tiny.py` | `equal=1` | 3 | 0 | 0 → 0.512 | – | – | 1.23",
        "`tiny.py` | – | 0, ended with status 1 | – | – | – | – | –",
    ]


def test_torchs_step_decoding_and_memory_have_rows(write):
    common = {"attention": "eager", "torch": "2", "transformers": "5"}
    step = common | {
        "what": "step",
        "sequences": 4,
        "tokens": 4096,
        "step_s": 8.0,
        "tokens_per_s": 2048.0,
        "peak_bytes": 6e10,
    }
    decode = common | {"what": "decode", "rows": 64, "keys": 1024, "step_s": 0.25}
    lack = common | {"out_of_memory": "too much", "decode": None, "sequences": 8, "tokens": 4096}
    text = write(*(make_record(f"torch_{i}", x) for i, x in enumerate((step, decode, lack))))
    rows = read_rows(text, "torch and transformers on the same card")
    assert [" | ".join(x.split(" | ")[:6]) for x in rows] == [
        "step | 4 × 4,096 | eager | 8.00 | 2,050 | 60.0",
        "decoding | 64 rows, 1,024 keys | eager | 0.250 | – | –",
        "step | 8 × 4,096 | eager | – | – | `too much`",
    ]


def test_recomputation_after_a_call_is_named(write):
    x = {
        "model": "20b",
        "rows": 64,
        "keys": 1024,
        "seconds_a_token": 0.02,
        "tokens_per_s": 3200.0,
        "gb_per_s": 647.2,
        "share_of_bandwidth": 0.1348,
        "peak_bytes": None,
    }
    recomputed = x | {"rows": 256, "recomputed": "bytes_a_token: it counted too many"}
    text = write(make_record("decode_b", recomputed), make_record("decode_a", x))
    assert read_rows(text, "Decoding") == [
        f"20b | {rows} | 1,024 | 20.0 | 3,200 | 647 | 0.135 | – | –" for rows in (64, 256)
    ]
    assert "\nComputed again after the call, of decode_b: bytes_a_token: it counted" in text


def test_forms_of_a_kernel_have_rows(write):
    x = {"product": "down", "rows": 98304, "form": "TWO", "error": 0.51, "same_bits": True}
    text = write(make_record("expert_tiles", x, x | {"same_bits": False, "ms": 1.2}))
    assert read_rows(text, "Forms of the kernel of four-bit experts") == [
        "down | 98,304 | TWO | – | – | – | 0.510 | yes",
        "down | 98,304 | TWO | 1.20 | – | – | 0.510 | no",
    ]


def test_each_chip_has_a_section_from_any_files(write):
    write(make_record("step_x", TIMED, chip="NVIDIA H200"), name="first.jsonl")
    text = write(make_record("step_x", TIMED), make_record("step_y", TIMED, chip="NVIDIA H200"))
    assert re.findall("^## (.*)$", text, re.M) == ["NVIDIA H100", "NVIDIA H200"]
    assert len(read_rows(text.partition("## NVIDIA H200")[2], "A step of RL")) == 2


@pytest.mark.parametrize(
    "x, text",
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (11889.6, "11,900"),
        (716.39, "716"),
        (31.44, "31.4"),
        (1.2, "1.20"),
        (0.10049, "0.100"),
        (0.0021654, "0.00217"),
        (6.59e-8, "6.59e-8"),
        (999.7, "1,000"),
        (-2.5, "-2.50"),
    ],
)
def test_a_number_has_three_digits(x, text):
    assert format_number(x) == text


def test_commands_are_shown_as_they_are_typed():
    command_now = "XLA_FLAGS='--a=0 --b=1' N=1 python -m m --set 'x=a b' --set y=2"
    early = """'XLA_FLAGS='"'"'--a=0 --b=1'"'"'' N=1 python -m m --set 'x=a b' --set y=2"""
    command_shown = """XLA_FLAGS="--a=0 --b=1" N=1 python -m m --set 'x=a b' --set y=2"""
    assert format_command(command_now) == format_command(early) == command_shown
    assert format_code("a |\n`b`") == "`a / 'b'`" and format_code("") == ""


def test_done_records_outrank_figures_which_outrank_none():
    ranked = [
        make_record("a", status="failed"),
        make_record("a", {"x": 1}, status="cut off"),
        make_record("a", status="failed"),
    ]
    assert results.choose_records(ranked)["a"]["status"] == "cut off"
    assert results.choose_records([make_record("a"), *ranked])["a"]["status"] == "done"
