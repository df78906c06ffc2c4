# SPDX-License-Identifier: Apache-2.0
"""Results of finished runs in one JSON file, so that an interrupted study continues.

Next: jaxmoe/study/contenders.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmoe.run_files import replace_text


class ResultsStore:
    """Results by the name of the run.

    The name must say everything that the result depends on: a result is never computed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, Any] = {}
        if path.is_file():
            try:
                self._results = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(
                    f"{path} must hold the results of a study as JSON; {error}. Move it away to "
                    "begin anew."
                ) from error

    def __len__(self) -> int:
        return len(self._results)

    def get_or_run(self, name: str, run: Callable[[], Any]) -> Any:
        """The stored result of `name`; otherwise that of `run`, which is stored."""
        if name not in self._results:
            self._results[name] = run()
            # Written after every run, so that an interruption loses only the run in progress.
            replace_text(self._path, _format_results(self._results))
        return self._results[name]


def _format_results(results: dict[str, Any]) -> str:
    """JSON with one line a run, so that a diff of two files is one of runs."""
    lines = (f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
