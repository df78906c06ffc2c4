# SPDX-License-Identifier: Apache-2.0
"""The frozen base weights of a run that trains adapters, as a Hugging Face folder.

The base is `init.checkpoint`. A run that makes its own base (a warm start, random weights) writes
it to `base` in the run folder, with experts in four bits and the rest in bfloat16, and reads it
back, so that a resume trains on the same values.
Next: jaxmoe/model/lora.py combines base and adapters.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import jax

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.packed import format_packing_errors, pack_experts
from jaxmoe.checkpoint.run import check_checkpoint_model
from jaxmoe.checkpoint.same_run import weights_digest
from jaxmoe.config import Config, ConfigError
from jaxmoe.shapes import Params


def base_folder(cfg: Config) -> Path:
    """The folder of a run's base; it may not exist yet."""
    init_checkpoint = cfg.init.checkpoint if cfg.warmup.steps == 0 else ""
    return Path(init_checkpoint or Path(cfg.workdir) / "base")


def own_base_digest(cfg: Config) -> dict[str, str]:
    """Digest of the base that the run itself made, by its key in a checkpoint; {} if none."""
    return {} if _uses_init_checkpoint(cfg) else base_digest(cfg)


def base_digest(cfg: Config) -> dict[str, str]:
    """Digest of the base of a run's adapters, by its key in a checkpoint.

    {} if the run has no adapters or the base does not exist.
    """
    folder = base_folder(cfg)
    if not cfg.lora.ranks or not folder.is_dir():
        return {}
    return {"init.checkpoint" if _uses_init_checkpoint(cfg) else "base": weights_digest(folder)}


def _uses_init_checkpoint(cfg: Config) -> bool:
    """True if the base is init.checkpoint, not a folder that the run wrote."""
    return bool(cfg.init.checkpoint) and cfg.warmup.steps == 0


def initial_experts(cfg: Config) -> Literal["dense", "packed"]:
    """The form in which a new run loads the experts of init.checkpoint."""
    return "packed" if cfg.lora.ranks and cfg.warmup.steps == 0 else "dense"


def check_base(cfg: Config) -> Path:
    """The folder of the base. Raises ConfigError if it is missing or belongs to another model."""
    folder = base_folder(cfg)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} must hold the base weights of this run's adapters; it does not exist. "
            "Restore it, or try a new --workdir."
        )
    check_checkpoint_model(cfg.model, folder)
    return folder


def portable_base_name(folder: Path) -> str:
    """A name for an adapter's base that is also valid on another machine.

    The hub's name if config.json has one; else the path relative to the working directory, if it
    is below it; else the folder's name (RUN/base for a base in a run folder). Never absolute.
    """
    try:
        name_or_path = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        name_or_path = None
    if isinstance(name_or_path, str) and name_or_path and not Path(name_or_path).is_absolute():
        return name_or_path
    base_path, working_dir = folder.resolve(), Path.cwd().resolve()
    if base_path.is_relative_to(working_dir):
        return base_path.relative_to(working_dir).as_posix()
    return "/".join(base_path.parts[-2:] if base_path.name == "base" else base_path.parts[-1:])


def load_base(cfg: Config) -> Params:
    """The base on the device, in the dtypes that the forward reads.

    With `lora.embedding_rows`, the embedding table is a numpy array on the host instead.
    Raises: ConfigError if the base is missing, damaged, or its experts are not packed.
    """
    folder = check_base(cfg)
    # Load into the final form at once: the device has no room for a second copy of the experts.
    base = load_params(folder, cfg.model, "as_read", experts="packed")
    table = {"embed": base.pop("embed")} if cfg.lora.embedding_rows else {}
    return jax.device_put(base) | table


def load_stage_base(cfg: Config, stage: str | None) -> Params | None:
    """The base if adapters are trained on it in this stage; None if all weights are trained.

    stage: of the newest checkpoint; None for a new run, which begins with RL on a given base.
    """
    at_rl = _uses_init_checkpoint(cfg) if stage is None else stage == "rl"
    return load_base(cfg) if cfg.lora.ranks and at_rl else None


def pack_base(policy: Params, cfg: Config) -> Params:
    """Write these weights as the base of the run and load it; prints the packing errors.

    An existing folder is overwritten: it is left from a start that ended before its first
    checkpoint.
    """
    folder = base_folder(cfg)
    packed, errors = pack_experts(policy, cfg.model)
    print(f"lora     {format_packing_errors(errors)}", flush=True)
    if folder.is_dir():
        shutil.rmtree(folder)
    save_params(packed, cfg.model, folder, dtype="mxfp4")
    # Read back from the files, so that this process and a resume train on the same rounded values.
    return load_base(cfg)
