# SPDX-License-Identifier: Apache-2.0
"""How many tests of `.ci/run` passed, by pytest's own reports (JUnit XML), against a table.

    passed.py part    TABLE REPORTS landing|all PART   fails where too few passed
    passed.py parts   TABLE REPORTS landing|all        fails where a part of the table did not run
    passed.py missing REPORTS COLLECTED CHIPS          names each test that passed in no part

A part's report is REPORTS/PART.xml; a lane that was skipped leaves REPORTS/LANE.skipped. COLLECTED
and CHIPS are what `pytest --collect-only -q` prints, of all tests and of those that need a chip.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def read_table(path: Path, kind: str) -> dict[str, tuple[str, int]]:
    """Return (lane, least number) of each part that a run of this kind has."""
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    rows = [line for line in lines if line[0] != "#"]
    column = {"landing": 2, "all": 3}[kind]
    return {row[1]: (row[0], int(row[column])) for row in rows if row[column] != "-"}


def read_report(path: Path) -> tuple[set[str], dict[str, str]]:
    """The tests that passed, and those that were skipped with the reason, by classname.name."""
    passed, skipped = set(), {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        reason = case.find("skipped")
        if reason is not None:
            skipped[name] = reason.get("message", "")
        elif case.find("failure") is None and case.find("error") is None:
            passed.add(name)
    return passed, skipped


def check_part(table: Path, reports: Path, kind: str, part: str) -> str:
    """One line about this part; raises SystemExit where it did not prove that it ran."""
    rows = read_table(table, kind)
    if part not in rows:
        raise SystemExit(f"CI: {table} must have a number for the part {part}, and has none.")
    _, least = rows[part]
    report = reports / f"{part}.xml"
    if not report.exists():
        raise SystemExit(f"CI: part {part} must leave a report of pytest, and left none.")
    count = len(read_report(report)[0])
    if count < least:
        raise SystemExit(
            f"CI: at least {least:,} tests must pass in part {part}, and {count:,} did. Look at "
            f"what was skipped or not collected; where tests were removed on purpose, change "
            f"{table}."
        )
    return f"part {part}: {count:,} tests passed, at least {least:,} must"


def check_parts(table: Path, reports: Path, kind: str) -> str:
    """One line; raises SystemExit where a part of the table left no report."""
    rows = read_table(table, kind)
    lanes = {lane for lane, _ in rows.values() if (reports / f"{lane}.skipped").exists()}
    absent = [
        part
        for part, (lane, _) in rows.items()
        if lane not in lanes and not (reports / f"{part}.xml").exists()
    ]
    if absent:
        raise SystemExit(f"CI: parts that did not run: {', '.join(absent)}.")
    skipped = f", but for the lane {', '.join(sorted(lanes))}" if lanes else ""
    return f"all {len(rows)} parts ran{skipped}"


def read_collected(path: Path) -> dict[str, str]:
    """Node ids by the name that a JUnit report gives the test."""
    ids = [line for line in path.read_text().splitlines() if "::" in line]
    found = {}
    for one in ids:
        file, *names = one.split("[", 1)[0].split("::")
        parameters = "[" + one.split("[", 1)[1] if "[" in one else ""
        dotted = ".".join([file.removesuffix(".py").replace("/", "."), *names])
        found[dotted + parameters] = one
    return found


def check_missing(reports: Path, collected: Path, chips: Path) -> str:
    """Count by reason the tests that no part passed; raises SystemExit for one without a reason."""
    tests, on_chips = read_collected(collected), read_collected(chips)
    passed: set[str] = set()
    skipped: dict[str, str] = {}
    for report in sorted(reports.glob("*.xml")):
        passes, skips = read_report(report)
        passed |= passes
        skipped |= skips
    lanes = sorted(path.stem for path in reports.glob("*.skipped"))
    absent = [name for name in tests if name not in passed]
    reasons = Counter(
        "needs a GPU or a TPU" if name in on_chips else f"skipped: {skipped[name]}"
        for name in absent
        if name in on_chips or name in skipped
    )
    lines = [f"{len(tests):,} tests collected, {len(absent):,} of them passed in no part"]
    lines += [f"  {count:,} {reason}" for reason, count in reasons.most_common()]
    unknown = [tests[name] for name in absent if name not in on_chips and name not in skipped]
    if unknown and lanes:
        lines.append(f"  {len(unknown):,} in no part that ran, without the lane {', '.join(lanes)}")
    elif unknown:
        listed = "\n".join(unknown)
        raise SystemExit("\n".join([*lines, f"CI: no part has these tests:\n{listed}"]))
    return "\n".join(lines)


def main(task: str, *words: str) -> None:
    if task == "part":
        table, reports, kind, part = words
        print(check_part(Path(table), Path(reports), kind, part))
    elif task == "parts":
        table, reports, kind = words
        print(check_parts(Path(table), Path(reports), kind))
    elif task == "missing":
        print(check_missing(*map(Path, words)))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
