# SPDX-License-Identifier: Apache-2.0
"""Seconds of tests by kind, and the dearest tests, from a report of pytest.

python -m pytest -q -n 2 --dist loadfile --junitxml=report.xml
python -m benchmarks.test_minutes report.xml
"""

import argparse
from collections import Counter
from xml.etree import ElementTree

# The first that a test's module begins with, or has in it.
KINDS = (
    ("kernels", ("tests.pallas_kernels", "tests.benchmarks.kernels")),
    ("pages and house rules", ("tests.test_", "tests.launch", "tests.docs")),
    ("vLLM and servers, without vLLM", ("jaxmoe.vllm", "http_engine", "weight_sync")),
    ("runs and commands", ("jaxmoe.test_", "jaxmoe.run.", "jaxmoe.distributed")),
    ("model, meshes and steps", (".model.", ".rl.", ".batches.", ".parallel.", ".rollout.")),
    ("episodes, rewards, sandbox", (".environments.", ".rewards.", ".graders.", ".sandbox.")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("report")
    parser.add_argument("--dearest", type=int, default=20)
    args = parser.parse_args()
    cases = [
        (float(case.get("time", 0)), f"{case.get('classname')}.{case.get('name')}")
        for case in ElementTree.parse(args.report).iter("testcase")
    ]
    seconds, counts = Counter[str](), Counter[str]()
    for time, name in cases:
        kind = next((k for k, parts in KINDS if any(p in name for p in parts)), "the rest")
        seconds[kind] += round(1000 * time)
        counts[kind] += 1
    print("| kind | tests | seconds |\n|---|---|---|")
    for kind, ms in seconds.most_common():
        print(f"| {kind} | {counts[kind]:,} | {ms / 1000:.0f} |")
    print(f"| together | {len(cases):,} | {sum(seconds.values()) / 1000:.0f} |")
    for time, name in sorted(cases, reverse=True)[: args.dearest]:
        print(f"{time:6.1f} s  {name}")


if __name__ == "__main__":
    main()
