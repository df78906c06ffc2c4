# SPDX-License-Identifier: Apache-2.0
"""Times of a compiler's schedule: read from the bench's output, and put into the page."""

import json

from benchmarks.on_device import schedules

PRINTED = """sink_attention on v6e, 1.75 GHz
full_20b  sink_attention_forward.1: 29332 bundles, 16.18 ms (DMA not included)
full_20b  jvp_sink_attention_forward_.1: 29332 bundles, 16.19 ms (DMA not included)
full_20b  transpose_jvp_sink_attention_dkv__.1: 9 bundles, 20.50 ms (DMA not included)
full_20b  transpose_jvp_sink_attention_dq__.2: 9 bundles, 3.25 ms (DMA not included)
          one iteration  787 cycles
"""


def test_times_of_each_kernel_are_read_and_those_of_a_pass_added():
    ms = schedules.parse_milliseconds(PRINTED)
    assert len(ms) == 4 and ms["sink_attention_forward"] == 16.18
    assert schedules.split_passes(ms) == (16.18, 23.75)


def test_the_section_has_a_row_a_case_and_a_column_a_chip(tmp_path):
    records = [
        schedules.make_record("sink_attention", "full_20b", chip, PRINTED)
        for chip in schedules.CHIPS
    ]
    path = tmp_path / "tpu.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    lines = schedules.format_schedules(path).splitlines()
    assert lines[-1] == "| sink_attention | full_20b |" + " 16.2 / 23.8 |" * 3
