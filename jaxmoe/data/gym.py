# SPDX-License-Identifier: Apache-2.0
"""Procedural tasks of reasoning-gym, by name, and their scorers.

Next: jaxmoe/answers/scoring.py.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import threading
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jaxmoe.answers import scoring
from jaxmoe.config import ConfigError
from jaxmoe.config.errors import suggest_name
from jaxmoe.data.rows import Row

_CACHED_ROWS = 1024
_LOCK = threading.Lock()


class GymSource:
    """Rows of a reasoning-gym task, generated when they are read; the last 1024 are cached.

    reasoning-gym generates row i from seed + i, so two seeds of one task share rows. Held-out
    rows must therefore be chosen by index, not by another seed.
    """

    def __init__(self, name: str, options: Mapping[str, Any], size: int, seed: int) -> None:
        self._name = name
        self._size = size
        self._dataset = _make_gym_dataset(name, options, size, seed)
        self._cached_entry = lru_cache(maxsize=_CACHED_ROWS)(self._generate_entry)
        self._scorer_risks = lru_cache(maxsize=None)(scoring.scorer_risks)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        entry = self._cached_entry(index)
        answer = entry["answer"]
        return Row(str(entry["question"]), None if answer is None else str(answer), columns=entry)

    def score(self, response: str, index: int) -> float:
        entry = self._cached_entry(index)
        scorer = self._dataset
        if self._name == "composite":
            scorer = scorer.datasets[entry["metadata"]["source_dataset"]]

        def check_answer(text: str) -> float:
            return scorer.score_answer(text, entry)

        answer = self[index].answer
        return scoring.score_checked(response, answer, check_answer, **self._scorer_risks(scorer))

    def _generate_entry(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        try:
            # Third-party code leaves files open and prints; neither belongs on the user's screen.
            # Both act on all threads, and two that leave them in another order would keep them.
            with _LOCK, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                return self._dataset[index]
        except Exception as error:
            raise ConfigError(
                f"data.task reasoning_gym:{self._name} must make {self._size} rows; row {index} "
                f"failed ({error}). Try other --set data.options.…=, or a smaller data.train_rows."
            ) from error


def is_gym_task(name: str) -> bool:
    """True if reasoning-gym is installed and has a task of this name."""
    factory = _import_gym_factory()
    return factory is not None and name in factory.DATASETS


def _make_gym_dataset(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    factory = _import_gym_factory()
    if factory is None:
        raise ConfigError(
            f"data.task reasoning_gym:{name} needs the package. Type: pip install reasoning-gym"
        )
    if name not in factory.DATASETS:
        raise ConfigError(
            f"data.task must name a reasoning-gym task; there is no {name!r}."
            f" {suggest_name(name, sorted(factory.DATASETS), 'reasoning_gym:')}"
        )
    fields = [f.name for f in dataclasses.fields(factory.DATASETS[name][1])]
    option_names = [field for field in fields if field not in ("seed", "size")]
    for key in options:
        if key not in option_names:
            raise ConfigError(
                f"data.options must be options of reasoning_gym:{name}; there is no {key!r}."
                f" {suggest_name(key, sorted(option_names), 'data.options.')} "
                "Or clear the options of the config file: --set data.options={}"
            )
    gym_options = dict(options)
    try:
        # A config file gives the parts of a composite task as plain dicts.
        if name == "composite":
            spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
            parts = gym_options.get("datasets", [])
            gym_options["datasets"] = [spec(**p) if isinstance(p, dict) else p for p in parts]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return factory.create_dataset(name, size=size, seed=seed, **gym_options)
    # The tasks check their options by assert, TypeError and ValueError.
    except Exception as error:
        option_text = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none"
        raise ConfigError(
            f"data.options must suit reasoning_gym:{name} with {size} rows; it refused "
            f"{option_text}: {error or type(error).__name__}. "
            f"Its options: {', '.join(option_names)}."
        ) from error


def _import_gym_factory() -> Any:
    """reasoning_gym.factory, imported only when needed (it takes 1.3 s); None if not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
