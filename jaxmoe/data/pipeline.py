# SPDX-License-Identifier: Apache-2.0
"""The endless, resumable stream of prompts that feeds the training loop.

grain shuffles the rows for each epoch. The prompts of a step depend on the seed alone, so they are
the same for any number of processes.
Next: jaxmoe/train.py reads the stream; jaxmoe/rollout/engine.py answers the prompts.
"""

from collections.abc import Iterator
from typing import Any

import grain

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Source
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.records import Prompt


class PromptIterator(Iterator[list[Prompt]]):
    """Iterator over the prompts of each step, with a small state to save."""

    def __init__(self, steps: Iterator[list[Prompt]], stream: dict[str, int]) -> None:
        self._steps: Any = steps
        self._stream = stream

    def __next__(self) -> list[Prompt]:
        return next(self._steps)

    @property
    def epoch(self) -> float:
        """Number of passes over all rows so far, with a fraction."""
        steps = self._steps.get_state()["next_index"]
        return steps * self._stream["prompts_per_step"] / self._stream["rows"]

    def get_state(self, step: int | None = None) -> dict[str, Any]:
        """The position in the stream, as JSON values; the same on every process.

        step: a step to return the position before it, instead of the present one.
        """
        position = self._steps.get_state() if step is None else {"next_index": step}
        return {"stream": dict(self._stream), "position": position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue right after the step at which the state was saved.

        Raises: ConfigError if the state belongs to a stream with other rows, seed or size.
        """
        for key, current in self._stream.items():
            saved = state["stream"].get(key)
            if saved != current:
                raise ConfigError(
                    f"a resumed run must keep its data; {key} was {saved} and is now {current}. "
                    f"Restore {key}={saved}, or start a new run with another --workdir."
                )
        self._steps.set_state(state["position"])


def stream_prompts(
    source: Source,
    tokenizer: Tokenizer,
    *,
    template: Template,
    prompts_per_step: int,
    max_prompt_tokens: int,
    seed: int,
    shuffle: bool = True,
) -> PromptIterator:
    """Endless lists of `prompts_per_step` prompts.

    prompts_per_step: P. Step s consists of the rows s*P … s*P+P-1 of the concatenated epochs.
    shuffle: True to reorder the rows in each epoch; False to keep the order of the source.

    Raises: ConfigError at once for a step without prompts; during iteration for a row that is
        longer than max_prompt_tokens or that the template cannot render.
    """
    if prompts_per_step < 1:
        raise ConfigError(
            f"rollout.prompts_per_step must be positive, got {prompts_per_step}. Try --set "
            "rollout.sequences_per_step=(a multiple of rollout.samples_per_prompt)."
        )

    def make_prompts(row_order: list[int]) -> list[Prompt]:
        return [
            make_prompt(source, row, tokenizer, template, max_prompt_tokens) for row in row_order
        ]

    # grain takes seeds of 32 bits.
    row_order = grain.MapDataset.source(range(len(source))).seed(seed % 2**32)
    row_order = (row_order.shuffle() if shuffle else row_order).repeat()
    # The stream is endless, so drop_remainder drops nothing. Without it, grain rounds
    # sys.maxsize / batch as a float, which is one too large at one prompt per step.
    steps = row_order.batch(prompts_per_step, drop_remainder=True, batch_fn=list).map(make_prompts)
    # Read in this thread: a source need not be thread-safe. No prefetch, so the saved position is
    # exactly the last step that was read.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    stream = {"rows": len(source), "seed": seed, "prompts_per_step": prompts_per_step}
    return PromptIterator(iter(steps.to_iter_dataset(options)), stream)


def make_prompt(
    source: Source, row: int, tokenizer: Tokenizer, template: Template, max_prompt_tokens: int
) -> Prompt:
    """Render and tokenize one row of a source.

    Raises: ConfigError if the prompt is longer than max_prompt_tokens, or if the template cannot
        render the row.
    """
    item = source[row]
    text, tokens = template.render(item, tokenizer)
    if len(tokens) > max_prompt_tokens:
        raise ConfigError(
            f"a prompt must have at most data.max_prompt_tokens ({max_prompt_tokens}) tokens; "
            f"row {row} has {len(tokens)}: {item.question!r:.60}. "
            f"Try --set data.max_prompt_tokens={len(tokens)}, or --set data.overlong_prompts=drop "
            "in a new run."
        )
    return Prompt(row, text, tuple(tokens), item.answer)
