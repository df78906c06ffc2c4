# SPDX-License-Identifier: Apache-2.0
"""What a device holds while adapters are trained over four-bit experts, by the chips' compilers."""

import pytest

from benchmarks.device_memory import Row, config, decoded, scoring, sizes, step
from jaxmoe.run.memory import plan_memory
from pallas_kernels import ahead_of_time

pytestmark = pytest.mark.usefixtures("standard_promotion")

GOALS = {  # bytes of arguments and temporaries
    Row("h100", "20b", 4096): 14.5e9,
    Row("h100", "20b", 8192): 15.8e9,
    Row("h100", "20b", 24_576): 18e9,
    Row("h100", "20b", 131_072): 40e9,
    Row("h100", "120b", 4096): 72e9,
}
SHORTEST = next(iter(GOALS))


def compiler(row):
    if reason := ahead_of_time.compiler_unavailable(row.chip):
        pytest.skip(reason)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    "row", GOALS, ids=lambda row: f"{row.model}-{row.tokens}-{row.rank}-{row.inputs}"
)
def test_an_rl_step_fits_as_dry_runs_say(row):
    compiler(row)
    cfg = config(row)
    compiled, mem = step(cfg, row.chip), plan_memory(cfg)
    resident, temporary, _ = sizes(compiled)
    counted = mem.training - mem.engine_copy  # which is no part of the step
    print(f"{row}: {(resident + temporary) / 1e9:.2f} GB, by the dry run {counted / 1e9:.2f}")
    assert resident + temporary <= GOALS[row]
    assert 0.9 < counted / (resident + temporary) < 1.1
    assert not decoded(compiled.as_text(), cfg)


@pytest.mark.aot
@pytest.mark.slow
def test_scoring_needs_no_more_than_the_step():
    compiler(SHORTEST)
    cfg = config(SHORTEST)
    compiled = scoring(cfg, SHORTEST.chip)
    resident, temporary, _ = sizes(compiled)
    assert resident + temporary <= GOALS[SHORTEST]
    assert not decoded(compiled.as_text(), cfg)


def test_decoded_or_copied_experts_are_recognised_in_programs():
    cfg = config(Row("h100", "20b", 4096))
    text = """
%fused_computation (param: u8[384,1440,5760]) -> bf16[32,2880,5760] {
  %inside = bf16[32,2880,5760]{2,1,0} convert(%param)
}

%body (p: u8[12,32,1440,5760]) -> (bf16[4096,2880]) {
  %p = u8[12,32,1440,5760]{3,2,1,0} parameter(0)
  %same = u8[384,1440,5760]{2,1,0} bitcast(%p)
  %rows = bf16[16384,5760]{1,0} custom-call(%same)
  %embedding = bf16[201216,2880]{1,0} copy(%rows)
  %whole = bf16[32,2880,5760]{2,1,0} fusion(%same), kind=kLoop
  %layer = u8[1,32,1440,5760]{3,2,1,0} fusion(%p), kind=kLoop
  ROOT %relaid = u8[12,32,1440,5760]{2,3,1,0} copy(%p)
}
"""
    names = [line.split()[line.startswith("ROOT")] for line in decoded(text, cfg)]
    assert names == ["%whole", "%layer", "%relaid"]
