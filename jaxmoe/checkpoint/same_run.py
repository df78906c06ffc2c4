# SPDX-License-Identifier: Apache-2.0
"""What may differ between the config of a checkpoint and the one that is given now.

Next: jaxmoe/checkpoint/run.py asks before it restores.
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

# what a resumed run may change: nothing that its numbers so far depend on
FREE = (
    "steps", "workdir", "eval.", "save.", "observe.", "gate.", "data.max_prompt_tokens",
    "data.reward_timeout_s", "rollout.vllm.", "optim.lr", "optim.clip_norm", "warmup.lr",
    "critic.lr",
    # the same sums, in other pieces
    "optim.microbatches", "optim.tokens_per_microbatch", "optim.remat",
    "optim.remat_keeps", "optim.remat_inputs", "optim.moments", "rollout.max_parallel_sequences",
    "lora.embedding_rows", "kernels", "mesh.", "model.numerics",  # the same, in another order
)  # fmt: skip
BLOCK = 65_536  # bytes of a file of weights that are read at a time
# what tells training rows from held-out rows, of one task
SPLIT = (
    "seed", "data.train_rows", "data.held_out_rows", "data.options.", "data.overlong_prompts",
)  # fmt: skip
# and where prompts that are too long are dropped, what says which these are
LENGTHS = ("data.max_prompt_tokens", "data.template", "data.system", "init.tokenizer")


@dataclass(frozen=True)
class Held:
    """Digests of what files held and hold, by the key of the config that names them."""

    then: Mapping[str, str]
    now: Mapping[str, str]

    @property
    def same(self) -> set[str]:
        return {key for key in self.then.keys() & self.now if self.then[key] == self.now[key]}

    def must_be_same(self, work: Path, keys: Iterable[str]) -> None:
        """Raises ConfigError where one of these files was edited, or is another."""
        for key in keys:
            then, now = self.then.get(key), self.now.get(key)
            if then is not None and now is not None and then != now:
                raise ConfigError(
                    f"{work} holds a run whose {key} held other content: its digest was {then}, "
                    f"and is {now}. Bring the file back as it was, or try a new --workdir."
                )


NOTHING = Held({}, {})


def weights_digest(directory: Path) -> str:
    """Of a checkpoint's safetensors: names, sizes and some of their bytes."""
    found = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for start in range(0, size, max(BLOCK, size // 64)):
                file.seek(start)
                found.update(file.read(BLOCK))
    return found.hexdigest()[:16]


def check_resume(work: Path, then: dict[str, Any], cfg: Config, held: Held = NOTHING) -> list[str]:
    """What a resume changes, to be told: "optim.lr=0.0001 (was 0.001)".

    Files may have moved: what they hold decides. Raises ConfigError where that is more than it may.
    """
    decays = _flat(then).get("optim.lr_end_fraction", 1.0) != 1.0
    drops = cfg.data.overlong_prompts == "drop"
    held.must_be_same(work, held.then)
    changed = []
    for name, old, new in _differences(then, cfg):
        if name in held.same:
            changed.append(f"{name}={new} (was {old}, which held the same)")
            continue
        other_rows = drops and name == "data.max_prompt_tokens"
        if not _one_of(name, FREE) or (name == "steps" and decays) or other_rows:
            why = " (its learning rate decays over them)" if name == "steps" else ""
            why = " (longer prompts were dropped)" if other_rows else why
            raise _refused(work, name, old, f"go on with {new}{why}")
        if name != "workdir":
            changed.append(f"{name}={new} (was {old})")
    return changed


def check_use(work: Path, then: dict[str, Any], cfg: Config, held: Held = NOTHING) -> None:
    """Raises ConfigError where the checkpoint is of another model, or saw the held-out rows."""
    if cfg.lora.ranks:  # adapters beside other weights are another model
        held.must_be_same(work, ("base", "init.checkpoint"))
    same_task = then["data"]["task"] == cfg.data.task or "data.task" in held.same
    if same_task:
        held.must_be_same(work, ("data.task", "data.options.held_out"))
    for name, old, new in _differences(then, cfg):
        if name in held.same:
            continue
        if name.startswith("model.") and name not in ("model.dtype", "model.numerics"):
            raise _refused(work, name, old, f"be read with {new}")
        drops = "drop" in (cfg.data.overlong_prompts, then["data"].get("overlong_prompts"))
        if same_task and _one_of(name, (*SPLIT, *LENGTHS) if drops else SPLIT):
            raise _refused(
                work, name, old,
                f"be scored with {new}: rows that it was trained on would count as held out",
            )  # fmt: skip


def _refused(work: Path, name: str, old: Any, what: str) -> ConfigError:
    if old is None:
        return ConfigError(
            f"{work} holds a run without {name}; it cannot {what}. Leave it out, or try a new "
            "--workdir."
        )
    return ConfigError(
        f"{work} holds a run with {name}={old}; it cannot {what}. "
        f"Try --set {shlex.quote(f'{name}={old}')}, or a new --workdir."
    )


def _one_of(name: str, keys: tuple[str, ...]) -> bool:
    return any(name.startswith(key) if key.endswith(".") else name == key for key in keys)


def _differences(then: dict[str, Any], cfg: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, its value then, its value now), None where a key of data.options is not there.

    A field that the checkpoint's version did not have had its default.
    """
    new = _flat(json.loads(to_json(cfg)))
    old = _flat(then)
    for name in [*new, *(name for name in old if name not in new)]:
        a, b = old.get(name), new.get(name)
        if name not in old and not name.startswith("data.options."):
            a = _default(cfg, name)
        elif name not in new and not name.startswith("data.options."):
            continue  # a field that there is no more
        if a != b:
            yield name, a, b


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in record.items():
        inner = isinstance(value, dict)
        made |= _flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return made


def _default(cfg: Config, name: str) -> Any:
    *path, last = name.split(".")
    part: Any = cfg
    for step in path:
        part = getattr(part, step)
    field = next(f for f in dataclasses.fields(part) if f.name == last)
    return None if field.default is dataclasses.MISSING else field.default
