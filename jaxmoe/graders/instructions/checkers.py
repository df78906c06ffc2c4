# SPDX-License-Identifier: Apache-2.0
"""Checkers of IFEval and IFBench, from the package if-verifiable, without network and randomness.

Next: jaxmoe/graders/instructions/reward.py scores answers with them.
"""

import importlib
import importlib.util
import math
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.errors import suggest_name

INSTALL = (
    "pip install --no-deps if-verifiable emoji immutabledict langdetect six syllapy (without "
    '--no-deps, pip install "jaxmoe[if]" also installs packages that are not used)'
)
# Checkers that are not available: they need data that nltk would download.
UNAVAILABLE = (
    "length_constraints:number_sentences",
    "change_case:capital_word_frequency",
    "format:title_case",
    "ratio:stop_words",
    "words:keywords_specific_position",
    "words:start_verb",
    "words:words_position",
)
_DETECT_LANGUAGE = (
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
)
_REGISTRIES = (
    "if_verifiable.ifeval.instructions_registry",
    "if_verifiable.ifbench.instructions_registry",
)
_PLAIN_ANSWER = "A short answer."


@dataclass(frozen=True)
class Instruction:
    """One instruction of a row: the id of its checker, and what it asks for."""

    id: str  # such as "punctuation:no_comma"
    kwargs: Mapping[str, Any]  # arguments of the checker


@lru_cache
def checker_classes() -> Mapping[str, Callable[[str], Any]]:
    """The available checkers by instruction id. Raises ConfigError without the package."""
    registries = _import_registries()
    classes = {k: v for registry in registries for k, v in registry.INSTRUCTION_DICT.items()}
    return {name: classes[name] for name in sorted(classes) if name not in UNAVAILABLE}


def check_instruction(instruction: Instruction) -> None:
    """Raise ConfigError if there is no such checker, or its kwargs do not determine what it asks.

    The message begins with the id. An incomplete instruction would be completed at random, and its
    answers would be checked for something that no prompt asks.
    """
    name = instruction.id
    checkers = [_build_checker(instruction, seed=seed) for seed in range(3)]
    checker = checkers[0]
    keys = checker.get_instruction_args_keys()
    if any(vars(checker) != vars(seeded) for seeded in checkers):
        raise ConfigError(
            f"{name} must have all of its kwargs ({', '.join(keys)}), got "
            f"{dict(instruction.kwargs)!r:.100}. Without them it asks for something random."
        )
    try:
        checker.check_following(_PLAIN_ANSWER)
    except Exception as error:
        raise ConfigError(
            f"{name} must be able to check an answer; with {dict(instruction.kwargs)!r:.100} it "
            f"raises {type(error).__name__}: {error}. Its kwargs: {', '.join(keys) or 'none'}."
        ) from error


def follows_instruction(text: str, instruction: Instruction) -> bool | None:
    """True if an answer follows an instruction; None if the checker cannot read the answer.

    An empty answer follows none, and a text whose language cannot be detected is in no language.
    The result is a function of the arguments. Raises ConfigError as check_instruction.
    """
    if not text.strip():
        return False
    checker = _build_checker(instruction, seed=0)
    try:
        if instruction.id in _DETECT_LANGUAGE and not _has_language(text):
            return False
        return bool(checker.check_following(text))
    # Some checkers index into texts that have no word, and json.loads recurses.
    except Exception:
        return None


def unknown_checker_error(name: str, names: Sequence[str], key: str = "") -> ConfigError:
    """The error for an instruction id that is not one of `names`."""
    prefix = f"{key}: " if key else ""
    if name in UNAVAILABLE:
        return ConfigError(
            f"{prefix}{name} is not available; it needs data that nltk would download. Remove it, "
            f"or name another: {', '.join(names)}."
        )
    return ConfigError(f"{prefix}there is no checker {name!r}. {suggest_name(name, names)}")


def _build_checker(instruction: Instruction, *, seed: int) -> Any:
    classes = checker_classes()
    if instruction.id not in classes:
        raise unknown_checker_error(instruction.id, list(classes))
    checker = classes[instruction.id](instruction.id)
    # Arrow tables fill in None for the kwargs of other instructions, pandas NaN; both may store
    # integers as floats.
    kwargs = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in instruction.kwargs.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
    with _seeded_random(seed):
        try:
            checker.build_description(**kwargs)
        except Exception as error:
            raise ConfigError(
                f"{instruction.id} must accept its kwargs, got {kwargs!r:.100}: {error}. "
                f"Its kwargs: {', '.join(checker.get_instruction_args_keys()) or 'none'}."
            ) from error
    return checker


def _has_language(text: str) -> bool:
    langdetect = importlib.import_module("langdetect")
    # langdetect samples from the text, by a generator that is seeded only if this is set.
    langdetect.DetectorFactory.seed = 0
    try:
        langdetect.detect(text)
    except langdetect.LangDetectException:
        return False
    return True


@contextmanager
def _seeded_random(seed: int) -> Iterator[None]:
    """Context in which the module `random` is seeded; the state before is restored."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _import_registries() -> list[types.ModuleType]:
    """Import the checkers of the package, but not its parts that load data sets.

    The checkers use two functions of nltk, and on import they would download its data. A module
    that has only these two functions takes its place during the import.
    """
    spec = importlib.util.find_spec("if_verifiable")
    if spec is None:
        raise ConfigError(
            f"instructions need the package if-verifiable, which is not installed. Type: {INSTALL}"
        )
    package: Any = types.ModuleType("if_verifiable")
    package.__path__ = list(spec.submodule_search_locations or ())
    replaced = {"if_verifiable": package, "nltk": _offline_nltk()}
    saved = {name: module for name, module in sys.modules.items() if _is_replaced(name)}
    for name in saved:
        del sys.modules[name]
    sys.modules.update(replaced)
    try:
        return [importlib.import_module(name) for name in _REGISTRIES]
    except ImportError as error:
        raise ConfigError(
            f"instructions need the packages of if-verifiable; {error}. Type: {INSTALL}"
        ) from error
    finally:
        for name in [name for name in sys.modules if _is_replaced(name)]:
            del sys.modules[name]
        sys.modules.update(saved)


def _is_replaced(name: str) -> bool:
    return name.partition(".")[0] in ("if_verifiable", "nltk")


def _offline_nltk() -> types.ModuleType:
    module: Any = types.ModuleType("nltk")
    module.data = types.SimpleNamespace(find=lambda path: path)
    module.tokenize = types.SimpleNamespace(
        RegexpTokenizer=lambda pattern: types.SimpleNamespace(tokenize=re.compile(pattern).findall)
    )
    module.ngrams = lambda items, n: zip(*(items[i:] for i in range(n)), strict=False)
    return module
