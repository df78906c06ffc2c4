# SPDX-License-Identifier: Apache-2.0
"""The progress line: one live line on a terminal, plain lines now and then elsewhere."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from jaxmoe.observe.printable import printable

PLAIN_EVERY_S = 5.0  # between plain lines
SOON_S = 2.0  # what takes less is not told while it goes on
FORMATS = {"tokens_per_s": "{:,.0f} tok/s", "engine_gap": "engine gap {:.1e}"}


class Progress:
    """Steps of one stage: step, the numbers shown, and seconds left by the recent steps' median.

    A context manager. Seconds left appear after two steps: the first one compiles.
    """

    def __init__(
        self, total: int, stage: str, *, done: int = 0, console: Console | None = None
    ) -> None:
        self._total, self._stage, self._done = total, stage, done
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._times: deque[float] = deque(maxlen=15)
        self._last = time.perf_counter()
        self._printed = -PLAIN_EVERY_S
        self._shown: dict[str, str] = {}
        self._raised: set[str] = set()
        self._unprinted = ""  # the newest plain line, while it waits
        self._bar: Bar | None = None
        self._doing: tuple[str, float, int, int] | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description:<7}"), BarColumn(24),
                TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}"),
                _Doing(self.doing),
                console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task(
                self._stage, total=self._total, completed=self._done, numbers="compiling…"
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._unprinted:  # stopped early: the last step is shown all the same
            self._print(self._unprinted)

    def update(self, step: int, **numbers: float | None) -> None:
        """Show a finished step; a number that is None keeps what it showed before."""
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last, self._doing, self._done = now, None, step
        self._shown |= {
            name: FORMATS.get(name, name + " {:.3f}").format(value)
            for name, value in numbers.items()
            if value is not None
        }
        text = "  ".join(shown for shown in self._shown.values() if shown)
        if len(self._times) >= 2:
            recent = list(self._times)[1:]
            text += f"  {statistics.median(recent) * (self._total - step):.0f} s left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        else:
            self._unprinted = f"{self._stage:<7} {step}/{self._total}  {text}"
            if step == self._total or now - self._printed >= PLAIN_EVERY_S or self._printed < 0:
                self._printed = now
                self._print(self._unprinted)
                self._unprinted = ""

    def tell(self, text: str, done: int = 0, total: int = 0) -> None:
        """What goes on within the step, and how much of it is done; shown where it takes a while.

        From any thread. On a terminal beside the bar, by the clock; elsewhere a line now and then,
        when this is called.
        """
        now, old = time.perf_counter(), self._doing
        began = old[1] if old is not None and old[0] == text and done >= old[2] else now
        self._doing = text, began, done, total
        if self._bar is None and self.doing() and now - self._printed >= PLAIN_EVERY_S:
            self._printed = now
            self._print(f"{self._stage:<7} {self._done}/{self._total}  {self.doing()}")

    def doing(self) -> str:
        """What is going on since more than two seconds: "scoring 12/256, 4 s"."""
        if self._doing is None:
            return ""
        text, began, done, total = self._doing
        spent = time.perf_counter() - began
        count = f" {done}/{total}" if total else ""
        return f"{text}{count}, {spent:.0f} s" if spent >= SOON_S else ""

    def _print(self, line: str) -> None:
        print(line, file=self._console.file, flush=True)

    def alert(self, step: int, raised: Mapping[str, str]) -> None:
        """A line for each alert that the step before did not raise; "!" beside the numbers."""
        for name in sorted(raised.keys() - self._raised):
            self.note(f"! step {step}: {raised[name]}")
        self._raised = set(raised)
        self._shown["!"] = f"! {len(raised)}" if raised else ""

    def note(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False)
        else:
            print(printable(text), file=self._console.file, flush=True)


class _Doing(ProgressColumn):
    """Asked anew whenever the bar is drawn."""

    def __init__(self, doing: Callable[[], str]) -> None:
        super().__init__()
        self._ask = doing

    def render(self, task: Task) -> Text:
        return Text(self._ask())


@contextmanager
def phase(text: str, *, file: TextIO | None = None) -> Iterator[None]:
    """Say what is going on for a few seconds, and how long it took."""
    out = file or sys.stdout
    print(f"{text}…", end="", file=out, flush=True)
    start = time.perf_counter()
    try:
        yield
    finally:
        print(f" {time.perf_counter() - start:.1f} s", file=out, flush=True)
