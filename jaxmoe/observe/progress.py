# SPDX-License-Identifier: Apache-2.0
"""The progress line: one live line on a terminal, else a plain line every few seconds."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from jaxmoe.observe.printable import escape_unprintable

PLAIN_INTERVAL_S = 5.0  # between plain lines
MIN_SHOWN_S = 2.0  # shorter activities are not shown
FORMATS = {"tokens_per_s": "{:,.0f} tok/s", "engine_gap": "engine gap {:.1e}"}


class Progress:
    """The progress line of one stage: step, numbers, and seconds left.

    A context manager. The time left is estimated from the median of recent steps; it appears after
    two steps, since the first one compiles.
    """

    def __init__(
        self, total: int, stage: str, *, step: int = 0, console: Console | None = None
    ) -> None:
        self._total, self._stage, self._step = total, stage, step
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._times: deque[float] = deque(maxlen=15)
        self._last = time.perf_counter()
        self._printed = -PLAIN_INTERVAL_S
        self._numbers: dict[str, str] = {}
        self._raised: set[str] = set()
        self._unprinted = ""  # the newest plain line, if it was not printed yet
        self._bar: Bar | None = None
        self._activity: tuple[str, float, int, int] | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description:<7}"),
                BarColumn(24),
                TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}"),
                _ActivityColumn(self.format_activity),
                console=self._console,
            )
            self._task = self._bar.add_task(
                self._stage, total=self._total, completed=self._step, numbers="compiling…"
            )
            self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._unprinted:  # stopped early: print the last step
            self._print_line(self._unprinted)

    def update(self, step: int, **numbers: float | None) -> None:
        """Show a finished step; a number that is None keeps its previous value."""
        time_s = time.perf_counter()
        self._times.append(time_s - self._last)
        self._last, self._activity, self._step = time_s, None, step
        self._numbers |= {
            name: FORMATS.get(name, name + " {:.3f}").format(value)
            for name, value in numbers.items()
            if value is not None
        }
        text = "  ".join(number_text for number_text in self._numbers.values() if number_text)
        if len(self._times) >= 2:
            recent = list(self._times)[1:]
            text += f"  {statistics.median(recent) * (self._total - step):.0f} s left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        else:
            self._unprinted = f"{self._stage:<7} {step}/{self._total}  {text}"
            if (
                step == self._total
                or time_s - self._printed >= PLAIN_INTERVAL_S
                or self._printed < 0
            ):
                self._printed = time_s
                self._print_line(self._unprinted)
                self._unprinted = ""

    def report(self, text: str, n_done: int = 0, total: int = 0) -> None:
        """Report the activity within a step; it is shown if it takes longer than MIN_SHOWN_S.

        Can be called from any thread. A terminal shows it next to the bar with a running clock;
        otherwise a call prints a line if the last one is PLAIN_INTERVAL_S old.
        """
        time_s, previous = time.perf_counter(), self._activity
        start = (
            previous[1]
            if previous is not None and previous[0] == text and n_done >= previous[2]
            else time_s
        )
        # One tuple, so that another thread reads a consistent state.
        self._activity = text, start, n_done, total
        if (
            self._bar is None
            and self.format_activity()
            and time_s - self._printed >= PLAIN_INTERVAL_S
        ):
            self._printed = time_s
            self._print_line(
                f"{self._stage:<7} {self._step}/{self._total}  {self.format_activity()}"
            )

    def format_activity(self) -> str:
        """The current activity, such as "scoring 12/256, 4 s"; "" before MIN_SHOWN_S."""
        if self._activity is None:
            return ""
        text, start, n_done, total = self._activity
        spent = time.perf_counter() - start
        count = f" {n_done}/{total}" if total else ""
        return f"{text}{count}, {spent:.0f} s" if spent >= MIN_SHOWN_S else ""

    def _print_line(self, line: str) -> None:
        print(line, file=self._console.file, flush=True)

    def alert(self, step: int, raised: Mapping[str, str]) -> None:
        """Print each alert that the previous step did not raise, and show "!" with the count."""
        for name in sorted(raised.keys() - self._raised):
            self.note(f"! step {step}: {raised[name]}")
        self._raised = set(raised)
        self._numbers["!"] = f"! {len(raised)}" if raised else ""

    def note(self, text: str) -> None:
        """Print a permanent line above the bar."""
        if self._bar is not None:
            self._bar.console.print(escape_unprintable(text), markup=False)
        else:
            print(escape_unprintable(text), file=self._console.file, flush=True)


class _ActivityColumn(ProgressColumn):
    """A column with the current activity, computed whenever the bar is drawn."""

    def __init__(self, format_activity: Callable[[], str]) -> None:
        super().__init__()
        self._format_activity = format_activity

    def render(self, task: Task) -> Text:
        return Text(self._format_activity())


@contextmanager
def report_phase(text: str) -> Iterator[None]:
    """Print an activity of a few seconds, and how long it took."""
    print(f"{text}…", end="", flush=True)
    start = time.perf_counter()
    try:
        yield
    finally:
        print(f" {time.perf_counter() - start:.1f} s", flush=True)
