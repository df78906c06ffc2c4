# SPDX-License-Identifier: Apache-2.0
"""Samples shown: the command, and answers that would rather be something else than text."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from jaxmoe import samples
from jaxmoe.observe.metrics import read_samples
from jaxmoe.observe.sample_rows import check_row_types
from jaxmoe.observe.samples_page import (
    MAX_STEPS,
    _row_html,
    escape_invisible,
    format_samples,
    group_by_step,
    write_page,
)

HOSTILE = (
    "<script>document.title='x'</script>",
    "</td></pre></section></body>",
    '"><img src=x onerror=1>',
    "<a href=\"javascript:document.title='x'\">here</a>",
    "\u202edesrever",
    "\x1b[2J\x1b]0;x\x07",
    "a\x00b",
    "\ud800 alone",
    "&lt;script&gt;",
    "<!-- ",
    "</title></style>",
    "y" * 100_000,
    "{body} %s {0}",
    "\u2028line",
    "\u200bzero",
)


def make_answer(text, **fields):
    return {"response": text, "reward": 1.0, "stop": "stop_token"} | fields


def make_row(step, text):
    row = {"stage": "rl", "step": step, "row": 3, "prompt": text, "answer": text}
    token = [text, -0.02, 0.5]
    sample = make_answer(text, advantage=0.5, gap_mean=1e-3, gap_max=0.02, length=1, tokens=[token])
    cut = make_answer(text, stop="max_tokens", reward=None, advantage=None, length=0, tokens=[])
    held_out = row | {"kind": "held_out"} | make_answer(text)
    return [row | {"kind": "group", "samples": [sample, cut]}, held_out]


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Tags(HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))

    def handle_data(self, data):
        self.text += data


def parsed(path):
    page = Tags()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_the_newest_step_is_printed_and_all_paged(tmp_path, capsys):
    run = write(tmp_path / "run", make_row(2, "two") + make_row(4, "four"))
    assert samples.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "rl step 4" in out and "reward 1  advantage +0.50" in out and "two" not in out
    assert "truncated" in out and out.endswith(f"steps recorded: 2, 4\npage  {run}/samples.html\n")
    text = parsed(run / "samples.html").text
    assert "rl step 2" in text and "two" in text and "four" in text
    assert samples.main([str(run), "--step", "2"]) == 0
    assert "four" not in capsys.readouterr().out + parsed(run / "samples.html").text


@pytest.mark.parametrize(
    "args, message",
    [([], "must be the folder of a run"), (["--step", "5"], "(2, 4), got 5. Try --step 4.")],
    ids=["no run", "no such step"],
)
def test_a_mistake_is_one_line(tmp_path, capsys, args, message):
    run = write(tmp_path, make_row(2, "a") + make_row(4, "b")) if args else tmp_path / "none"
    assert samples.main([str(run), *args]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_invalid_or_older_lines_are_shown_or_skipped(tmp_path, capsys):
    old = {"stage": "rl", "step": 1, "prompt": "p", "response": "r", "answer": None, "reward": None}
    run = write(tmp_path, [old, {"note": 1}, {"stage": "warmup", "step": 3}])
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"stage": "rl", "st')
    assert samples.main([str(run)]) == 0
    assert "reward none  r" in capsys.readouterr().out


def test_piped_into_head_there_is_no_traceback(tmp_path):
    long = [row for step in (1, 2) for row in make_row(step, "x" * 50) * 300]
    run = write(tmp_path / "run", long)
    result = subprocess.run(
        f"{sys.executable} -m jaxmoe.samples {run} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.stdout, result.stderr) == ("rl step 2\n", "")
    assert "rl step 1" in parsed(run / "samples.html").text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_answer_is_text_and_nothing_else(tmp_path, capsys, text):
    """The page of a hostile answer has the tags of a harmless one's."""
    pages = []
    for name, text_of_answer in (("plain", "plain"), ("hostile", text)):
        run = write(tmp_path / name, make_row(2, text_of_answer))
        assert samples.main([str(run)]) == 0
        pages.append(parsed(run / "samples.html"))
    plain, hostile = ([t for t in page.tags if t != ("i", ())] for page in pages)
    assert hostile == plain
    assert not any(name.startswith("on") or name in ("href", "src") for _, a in plain for name in a)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x00" not in out and max(map(len, out.splitlines())) < 400
    unseen = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
    assert not unseen.search(out) and not unseen.search(pages[1].text)
    if len(text) < 1000:
        assert escape_invisible(text) in pages[1].text.replace("\n", "")


def test_what_cannot_be_seen_is_spelled_out():
    assert escape_invisible("a\x1b[0m\u202e\x00\ud800é\n") == r"a\x1b[0m\u202e\x00\ud800é\n"


def test_a_long_run_shows_first_last_and_between(tmp_path):
    rows = [row for step in range(200) for row in make_row(step, f"s{step}")]
    write_page(rows, "many", tmp_path / "page.html")
    steps = [
        int(n) for n in re.findall(r"<summary>rl step (\d+)", (tmp_path / "page.html").read_text())
    ]
    assert len(steps) == MAX_STEPS and steps[0] == 199 and steps[-1] == 0
    assert steps == sorted(steps, reverse=True)


def test_the_page_opens_at_the_newest_step(tmp_path):
    write_page([row for n in (2, 4, 6) for row in make_row(n, "a")], "t", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r"<details( open)?><summary>rl step (\d)", page) == [
        (" open", "6"),
        ("", "4"),
        ("", "2"),
    ]


def test_a_question_behind_a_system_prompt_is_printed(tmp_path, capsys):
    prompt = f"<|system|>{'You are careful. ' * 99}<|user|>What is 12 * 34?<|assistant|>"
    answer = f"{'Let me think. ' * 99}It is 408."
    row = {"stage": "rl", "step": 1, "kind": "held_out", "prompt": prompt} | make_answer(answer)
    assert samples.main([str(write(tmp_path, [row]))]) == 0
    out = capsys.readouterr().out
    assert "<|system|>You are" in out and "What is 12 * 34?" in out and "It is 408." in out
    assert len(out) < 1000


@pytest.mark.parametrize(("text", "note"), [("", "(empty)"), (" \n", "(white space)")])
def test_an_answer_that_shows_nothing_has_a_note(tmp_path, capsys, text, note):
    row = {"stage": "rl", "step": 1, "prompt": "q", "answer": None}
    sample = make_answer(text, advantage=0.5, length=0, tokens=[])
    rows = [row | {"kind": "group", "samples": [sample]}, row | make_answer(text)]
    rows.append(row | make_answer("x", transcript=[["policy", "final", text]]))
    run = write(tmp_path, rows)
    assert samples.main([str(run)]) == 0
    assert capsys.readouterr().out.count(note) == parsed(run / "samples.html").text.count(note) == 3


def test_steps_are_in_order_whatever_the_file_says(tmp_path):
    write(tmp_path, make_row(4, "b") + make_row(2, "a"))
    assert list(group_by_step(read_samples(tmp_path / "samples.jsonl"))) == [2, 4]


def make_episode_rows(text="4761", speaker="python"):
    sample = make_answer(
        "final: 4761",
        stop="max_turns",
        advantage=0.5,
        gap_mean=1e-3,
        gap_max=0.02,
        length=3,
        turns=2,
        env_length=4,
        tokens=[["69*69", -0.02, 0.5], [text], ["4761", 0.0, 1.0]],
        transcript=[
            ["policy", "assistant to python", "69*69"],
            ["environment", speaker, text],
            ["policy", "", "final: 4761"],
        ],
    )
    row = {"stage": "rl", "step": 1, "row": 3, "prompt": "69*69", "answer": "4761"}
    held_out = row | {"kind": "held_out"} | sample
    return [row | {"kind": "group", "samples": [sample]}, held_out]


def test_episodes_have_a_line_per_message_in_colour(tmp_path, capsys):
    run = write(tmp_path / "run", make_episode_rows())
    assert samples.main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].endswith("2 turns, 4 tokens of the environment  max turns")
    assert lines[5:8] == [
        "      assistant to python  69*69",
        "      python               4761",
        "      (policy)             final: 4761",
    ]
    page = (run / "samples.html").read_text()
    assert (
        "<span class=e>4761</span>" in page
        and "<p class=w>python</p><pre class=e>4761</pre>" in page
    )
    assert page.count('title="Δlogp') == 2  # not at the environment's tokens
    assert "<b>max turns</b>" in page


@pytest.mark.parametrize("text", HOSTILE)
def test_replies_of_an_environment_are_text(tmp_path, text):
    write_page(make_episode_rows(text, text), "title", tmp_path / "page.html")
    write_page(make_episode_rows("harmless"), "title", tmp_path / "harmless.html")
    tags = [
        [t for t in parsed(tmp_path / f"{name}.html").tags if t[0] != "i"]
        for name in ("page", "harmless")
    ]
    assert tags[0] == tags[1]


def test_a_transcript_of_wrong_types_is_left_out():
    (row,) = make_episode_rows()[1:]
    row["transcript"] = [
        ["policy", {"a": 1}, []],
        ["<b>", "", "x"],
        "policy",
        ["policy", "ok"],
        ["policy", "", "ok"],
    ]
    (checked,) = group_by_step([row])[1]
    assert checked["transcript"] == [["policy", "(dict)", "(list)"], ["policy", "", "ok"]]


def test_a_single_answer_names_no_environment(capsys, tmp_path):
    transcript = [["policy", "assistant (analysis)", "hm"], ["policy", "assistant", "4761"]]
    answer = make_answer("", transcript=transcript, turns=1, env_length=0)
    fault = answer | {"stop": "env_error", "fault": "ValueError: \x1b[2J no"}
    row = {"stage": "rl", "step": 1, "row": 3, "prompt": "69*69", "answer": "4761"}
    run = write(tmp_path / "run", [row | {"kind": "held_out"} | fault])
    assert samples.main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:7] == [
        r"    reward 1  env error: ValueError: \x1b[2J no",
        "      assistant (analysis)  hm",
        "      assistant             4761",
    ]
    assert "<b>env error: ValueError:" in (run / "samples.html").read_text()


def test_rewards_of_turns_are_shown_where_several():
    answer = {"reward": 1.0, "turn_rewards": [0.25, 0.75, "x"], "response": "r"}
    for row in (answer, {"kind": "group", "samples": [answer]}):
        checked = check_row_types({"stage": "rl", "step": 1} | row)
        assert "reward 1 (0.25, 0.75, none by turn)" in format_samples(1, [checked])
        assert "reward 1 (0.25, 0.75, none by turn)" in _row_html(checked)
