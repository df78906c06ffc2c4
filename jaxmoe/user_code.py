# SPDX-License-Identifier: Apache-2.0
"""Calls of the user's functions: what they raise is theirs, and ends no run.

`sys.exit()` in an environment would end training with its status and without a line, since
SystemExit is no Exception. Next: jaxmoe/environments/episodes.py, which calls environments.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class UserCodeExit(RuntimeError):
    """The user's code raised what ends a program or a thread, such as sys.exit()."""

    @classmethod
    def from_error(cls, error: BaseException) -> "UserCodeExit":
        return cls(f"{type(error).__name__}({read_text(error)}) would have ended the run")


def read_text(error: BaseException) -> str:
    """The text of an error of the user's code, whose class may raise when it is asked for one."""
    try:
        with user_code():
            return str(error)
    except Exception:
        return "it has no text"


@contextmanager
def user_code() -> Iterator[None]:
    """Raise UserCodeExit in place of what is no Exception; KeyboardInterrupt is the run's own stop.

    `with user_code(): environment.step(…)`, in a `try` that handles Exception.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserCodeExit.from_error(error) from error
