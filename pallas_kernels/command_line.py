# SPDX-License-Identifier: Apache-2.0
"""The argument parser of this package's commands: an error is one line and exit status 2."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that does not print its usage before an error."""

    def __init__(self, prog: str, doc: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=doc, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        """Print the message as one line and exit with status 2."""
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)

    def check_choice(self, option: str, value: Any, choices: Iterable[str]) -> None:
        """Exit with an error unless the value is one of `choices`, or None for an absent option."""
        if value is not None and value not in (names := list(choices)):
            self.error(f"{option} must be one of {', '.join(names)}; got {value!r}.")
