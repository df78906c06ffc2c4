# SPDX-License-Identifier: Apache-2.0
"""How the commands of this package refuse what was typed: one line, exit status 2."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that does not repeat its usage before an error."""

    def __init__(self, prog: str, doc: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=doc, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        """Say it and leave."""
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)

    def one_of(self, what: str, given: Any, known: Iterable[str]) -> None:
        """Refuse what is not known; None was not given."""
        if given is not None and given not in (names := list(known)):
            self.error(f"{what} must be one of {', '.join(names)}; got {given!r}.")
