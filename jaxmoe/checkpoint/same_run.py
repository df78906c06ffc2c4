# SPDX-License-Identifier: Apache-2.0
"""Compare the config of a checkpoint with the current one, and refuse changes that matter.

Next: jaxmoe/checkpoint/run.py calls this before it restores.
"""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.config import Config, ConfigError, to_json
from jaxmoe.config.engine import may_change_at_resume
from jaxmoe.config.settings import iter_settings
from jaxmoe.model.weights import weights_of

BLOCK_BYTES = 65_536  # bytes of each sample of a weights file
# Settings that decide which rows of a task are held out.
SPLIT_KEYS = (
    "seed",
    "data.train_rows",
    "data.held_out_rows",
    "data.options.",
    "data.overlong_prompts",
    "data.distinct",
    "data.columns.",
)
# Settings that are dicts: a key may be in one of two configs alone.
DICT_KEYS = ("data.options.", "data.columns.")
# If too long prompts are dropped, these settings decide which ones.
LENGTH_KEYS = (
    "data.max_prompt_tokens",
    "data.map_rows",
    "data.template",
    "data.system",
    "data.keep_analysis",
    "init.tokenizer",
)


@dataclass(frozen=True)
class ContentDigests:
    """Saved and current digests of files, by the config key that names them."""

    saved: Mapping[str, str]
    current: Mapping[str, str]

    @property
    def unchanged_keys(self) -> set[str]:
        return {
            key for key in self.saved.keys() & self.current if self.saved[key] == self.current[key]
        }

    def check_unchanged(self, work: Path, keys: Iterable[str]) -> None:
        """Raise ConfigError if one of these files has another content than at the checkpoint."""
        for key in keys:
            saved, current = self.saved.get(key), self.current.get(key)
            if saved is not None and current is not None and saved != current:
                raise ConfigError(
                    f"{work} holds a run whose {key} had other contents: its digest was {saved}, "
                    f"and is now {current}. Restore the file, or try a new --workdir."
                )


NO_DIGESTS = ContentDigests({}, {})


def weights_digest(directory: Path) -> str:
    """Digest of a checkpoint's safetensors: their names, sizes and a sample of their bytes."""
    hasher = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        hasher.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            # A sample, because reading all of a large checkpoint would take minutes at every start.
            for start in range(0, size, max(BLOCK_BYTES, size // 64)):
                file.seek(start)
                hasher.update(file.read(BLOCK_BYTES))
    return hasher.hexdigest()[:16]


def check_resume(
    work: Path, saved_config: dict[str, Any], cfg: Config, digests: ContentDigests = NO_DIGESTS
) -> list[str]:
    """Descriptions of the changed settings of a resume, such as "optim.lr=0.0001 (was 0.001)".

    Files may have moved; their contents are compared. Raises ConfigError for a setting that must
    not change.
    """
    decays = _flatten(saved_config).get("optim.lr_end_fraction", 1.0) != 1.0
    drops = cfg.data.overlong_prompts == "drop"
    _check_same_columns(work, saved_config, cfg, "continue")
    digests.check_unchanged(work, digests.saved)
    changeable = {key for key, _, fact in iter_settings(Config) if fact.resume}
    changed = []
    for name, old, new in _find_differences(saved_config, cfg):
        if name in digests.unchanged_keys:
            changed.append(f"{name}={new} (was {old}, with the same contents)")
            continue
        other_rows = drops and name == "data.max_prompt_tokens"
        may_change = name in changeable or may_change_at_resume(cfg, name, old)
        if not may_change or (name == "steps" and decays) or other_rows:
            reason = " (its learning rate decays over them)" if name == "steps" else ""
            reason = " (longer prompts were dropped)" if other_rows else reason
            raise _refusal_error(work, name, old, f"continue with {new}{reason}")
        if name != "workdir":
            changed.append(f"{name}={new} (was {old})")
    return changed


def check_use(
    work: Path, saved_config: dict[str, Any], cfg: Config, digests: ContentDigests = NO_DIGESTS
) -> None:
    """Raise ConfigError if the checkpoint has another model or trained on the held-out rows."""
    _check_same_tokens(work, saved_config, cfg, digests)
    if weights_of(cfg).base:
        _check_same_base(work, saved_config, cfg)
        digests.check_unchanged(work, ("base", "init.checkpoint"))
    same_task = (
        saved_config["data"]["task"] == cfg.data.task or "data.task" in digests.unchanged_keys
    )
    if same_task:
        _check_same_columns(work, saved_config, cfg, "be evaluated")
        digests.check_unchanged(work, ("data.task", "data.options.held_out"))
    for name, old, new in _find_differences(saved_config, cfg):
        if name in digests.unchanged_keys:
            continue
        is_model = name.startswith("model.") and name not in ("model.dtype", "model.numerics")
        if is_model or name == "router.route" or _changes_scales(name, cfg):
            raise _refusal_error(work, name, old, f"be used with {new}")
        # With an environment complete rows are compared, without one questions are.
        other_split = name == "data.environment" and bool(old) != bool(new)
        drops = "drop" in (cfg.data.overlong_prompts, saved_config["data"].get("overlong_prompts"))
        keys = (*SPLIT_KEYS, *LENGTH_KEYS) if drops else SPLIT_KEYS
        if same_task and (other_split or _matches_key(name, keys)):
            raise _refusal_error(
                work,
                name,
                old,
                f"be evaluated with {new}: rows that it was trained on would count as held out",
            )


def _check_same_tokens(
    work: Path, saved_config: dict[str, Any], cfg: Config, digests: ContentDigests
) -> None:
    """Raise ConfigError if texts get other tokens, or other tokens end a turn."""
    key, saved = "init.tokenizer", saved_config["init"]
    if key in digests.unchanged_keys:
        return
    if digests.saved.get(key) and digests.current.get(key):
        for name, new in (("tokenizer", cfg.init.tokenizer), ("checkpoint", cfg.init.checkpoint)):
            if saved[name] != new:
                action = f"be used with {new or 'none'}, which has other tokens or ends of a turn"
                raise _refusal_error(work, f"init.{name}", saved[name], action)
    digests.check_unchanged(work, (key,))


def _check_same_base(work: Path, saved_config: dict[str, Any], cfg: Config) -> None:
    """Raise ConfigError if adapters were trained over a base of the run's own and would be read
    over init.checkpoint, or the reverse."""
    init, steps = saved_config["init"]["checkpoint"], saved_config["warmup"]["steps"]
    if bool(steps) != bool(cfg.warmup.steps):
        base = "its own base" if steps or not init else init
        action = f"be used with {cfg.warmup.steps}, since its adapters are those of {base}"
        raise _refusal_error(work, "warmup.steps", steps, action)
    if not steps and bool(init) != bool(cfg.init.checkpoint):
        action = f"be used with {cfg.init.checkpoint or 'none'}, which is another base"
        raise _refusal_error(work, "init.checkpoint", init, action)


def _changes_scales(name: str, cfg: Config) -> bool:
    """True for a setting that scales adapters; it changes no array's shape."""
    lora = cfg.lora
    ranks = {
        "lora.attention_alpha": lora.attention_rank,
        "lora.expert_alpha": lora.expert_rank,
        "lora.rank_stabilized": lora.rank,
    }
    return ranks.get(name, 0) > 0


def _check_same_columns(work: Path, saved_config: dict[str, Any], cfg: Config, verb: str) -> None:
    """Raise ConfigError if other columns are read, before the rows count as another file's."""
    for name, old, new in _find_differences(saved_config, cfg):
        if name.startswith("data.columns."):
            raise _refusal_error(work, name, old, f"{verb} with {new or 'none'}")


def _refusal_error(work: Path, name: str, old: Any, action: str) -> ConfigError:
    if old is None:
        return ConfigError(
            f"{work} holds a run without {name}; it cannot {action}. Omit it, or try a new "
            "--workdir."
        )
    return ConfigError(
        f"{work} holds a run with {name}={old}; it cannot {action}. "
        f"Try --set {shlex.quote(f'{name}={old}')}, or a new --workdir."
    )


def _matches_key(name: str, keys: tuple[str, ...]) -> bool:
    return any(name.startswith(key) if key.endswith(".") else name == key for key in keys)


def _find_differences(saved_config: dict[str, Any], cfg: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, saved value, current value) of each difference; None for a missing key of DICT_KEYS.

    A field that the checkpoint's version lacked counts as its default.
    """
    new = _flatten(json.loads(to_json(cfg)))
    old = _flatten(saved_config)
    for name in [*new, *(name for name in old if name not in new)]:
        a, b = old.get(name), new.get(name)
        if name not in old and not name.startswith(DICT_KEYS):
            a = _default_value(cfg, name)
        # A field that no longer exists has no value that could be compared.
        elif name not in new and not name.startswith(DICT_KEYS):
            continue
        if a != b:
            yield name, a, b


def _flatten(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in record.items():
        inner = isinstance(value, dict)
        fields |= _flatten(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return fields


def _default_value(cfg: Config, name: str) -> Any:
    *path, last = name.split(".")
    part: Any = cfg
    for step in path:
        part = getattr(part, step)
    field = next(f for f in dataclasses.fields(part) if f.name == last)
    return None if field.default is dataclasses.MISSING else field.default
