# SPDX-License-Identifier: Apache-2.0
"""The endless, resumable stream of prompts that feeds the training loop.

Shuffled anew each epoch by grain. A step's prompts are fixed by the seed alone and then cut
among processes, so the global batch is the same on one process or on many.
Next: jaxmoe/train.py pulls from here; jaxmoe/rollout/engine.py answers.
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
    """This process's prompts of each step. Its state is a small dict for the checkpoint."""

    def __init__(self, steps: Iterator[list[Prompt]], stream: dict[str, int]) -> None:
        self._steps: Any = steps
        self._stream = stream

    def __next__(self) -> list[Prompt]:
        return next(self._steps)

    @property
    def epoch(self) -> float:
        """How often all rows have been read, so far."""
        steps = self._steps.get_state()["next_index"]
        return steps * self._stream["prompts_per_step"] / self._stream["rows"]

    def get_state(self) -> dict[str, Any]:
        """JSON-serialisable, the same on every process, whatever their number."""
        return {"stream": dict(self._stream), "position": self._steps.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the step the state was taken at.

        Raises: ConfigError where the state is of another stream.
        """
        for key, now in self._stream.items():
            then = state["stream"].get(key)
            if then != now:
                raise ConfigError(
                    f"a resumed run must keep its data: {key} was {then}, is {now}. "
                    f"Restore {key}={then}, or start anew with another --workdir."
                )
        self._steps.set_state(state["position"])


def prompts(
    source: Source,
    tokenizer: Tokenizer,
    *,
    template: Template,
    prompts_per_step: int,
    max_prompt_tokens: int,
    seed: int,
    shuffle: bool = True,
    shard_index: int = 0,
    shard_count: int = 1,
) -> PromptIterator:
    """Endless lists of prompts_per_step / shard_count prompts, for process `shard_index`.

    prompts_per_step: of all processes together. Step s is rows s*P … s*P+P-1 of the shuffled
        epochs laid end to end; each process takes one contiguous share of it.
    shuffle: whether each epoch has an order of its own, or that of the source.

    Raises: ConfigError at once for sizes that do not divide, and, when it is read, for a row
        longer than max_prompt_tokens, or one that the template has no place for.
    """
    if prompts_per_step < 1 or prompts_per_step % shard_count:
        raise ConfigError(
            f"rollout.prompts_per_step ({prompts_per_step}) must be a positive multiple of the "
            f"{shard_count} processes. Try --set rollout.sequences_per_step="
            f"(a multiple of {shard_count} * rollout.samples_per_prompt)."
        )
    if not 0 <= shard_index < shard_count:
        raise ConfigError(f"shard_index ({shard_index}) must be in 0..{shard_count - 1}.")
    share = prompts_per_step // shard_count
    first = shard_index * share

    def read(rows: list[int]) -> list[Prompt]:
        return [
            make_prompt(source, row, tokenizer, template, max_prompt_tokens)
            for row in rows[first : first + share]
        ]

    rows = grain.MapDataset.source(range(len(source))).seed(seed % 2**32)
    rows = (rows.shuffle() if shuffle else rows).repeat()
    # drop_remainder of an endless stream drops nothing; without it grain divides sys.maxsize as
    # a float, which for one prompt a step is one too many
    steps = rows.batch(prompts_per_step, drop_remainder=True, batch_fn=list).map(read)
    # Read in this thread: a source need not be thread-safe, and no step is drawn ahead of time.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    stream = {"rows": len(source), "seed": seed, "prompts_per_step": prompts_per_step}
    return PromptIterator(iter(steps.to_iter_dataset(options)), stream)


def make_prompt(
    source: Source, row: int, tokenizer: Tokenizer, template: Template, max_prompt_tokens: int
) -> Prompt:
    """One row, rendered and tokenised: what `prompts` yields, for a held-out row.

    Raises: ConfigError where the prompt is longer than max_prompt_tokens, or the template has no
        place for the row.
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
