# SPDX-License-Identifier: Apache-2.0
"""The frozen weights beside which a run trains adapters: a folder as Hugging Face has them.

It is `init.checkpoint`, or, where the run makes its own (a warm start, random weights), `base` in
the run folder: experts in four bits, the rest in bfloat16, read back as a resume will read it.
Next: jaxmoe/model/lora.py puts the adapters beside them.
"""

import json
import shutil
from pathlib import Path

import jax

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.packed import pack_experts, summary
from jaxmoe.checkpoint.run import check_model
from jaxmoe.checkpoint.same_run import weights_digest
from jaxmoe.config import Config, ConfigError
from jaxmoe.shapes import Params


def base_folder(cfg: Config) -> Path:
    """Where a run's base lies, or will."""
    given = cfg.init.checkpoint if cfg.warmup.steps == 0 else ""
    return Path(given or Path(cfg.workdir) / "base")


def own_base(cfg: Config) -> dict[str, str]:
    """Digest of the base that a run made, as a checkpoint's contents keep it; nothing where it made
    none."""
    return {} if _is_given(cfg) else base_digest(cfg)


def base_digest(cfg: Config) -> dict[str, str]:
    """Digest of the base of a run's adapters, by the key under which a checkpoint keeps it; nothing
    where the run has no adapters, or the base is not there."""
    folder = base_folder(cfg)
    if not cfg.lora.ranks or not folder.is_dir():
        return {}
    return {"init.checkpoint" if _is_given(cfg) else "base": weights_digest(folder)}


def _is_given(cfg: Config) -> bool:
    """True where the base is init.checkpoint, and not one that the run wrote."""
    return bool(cfg.init.checkpoint) and cfg.warmup.steps == 0


def check_base(cfg: Config) -> Path:
    """The folder of the base. Raises ConfigError where it is not there, or of another model."""
    folder = base_folder(cfg)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} must hold the weights that this run's adapters belong to, and is not there. "
            "Bring it back, or try a new --workdir."
        )
    check_model(cfg.model, folder)
    return folder


def portable_name(folder: Path) -> str:
    """The name of an adapter's base, chosen so that it means the same on another machine.

    The hub's name where config.json has one; else the path as seen from here, if it is below; else
    the folder's name, of a base in a run folder with that one's. Never an absolute path.
    """
    try:
        named = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        named = None
    if isinstance(named, str) and named and not Path(named).is_absolute():
        return named
    place, here = folder.resolve(), Path.cwd().resolve()
    if place.is_relative_to(here):
        return place.relative_to(here).as_posix()
    return "/".join(place.parts[-2:] if place.name == "base" else place.parts[-1:])


def load_base(cfg: Config) -> Params:
    """The base on the device, as the forward reads it; with `lora.embedding_rows` the embedding's
    table is a numpy array, on the host.

    Raises ConfigError where it is not there, damaged, or not packed.
    """
    folder = check_base(cfg)
    # once: a copy of the experts would not fit beside them on the card that they were packed for
    base = load_params(folder, cfg.model, "as_read", experts="packed")
    table = {"embed": base.pop("embed")} if cfg.lora.embedding_rows else {}
    return jax.device_put(base) | table


def make_base(policy: Params, cfg: Config) -> Params:
    """These weights as a base, kept in the run folder; says what four bits cost.

    One that is there already is of a start that was cut off before its first checkpoint.
    """
    folder = base_folder(cfg)
    packed, errors = pack_experts(policy, cfg.model)
    print(f"lora     {summary(errors)}", flush=True)
    if folder.is_dir():
        shutil.rmtree(folder)
    save_params(packed, cfg.model, folder, dtype="mxfp4")
    return load_base(cfg)
