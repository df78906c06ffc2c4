# SPDX-License-Identifier: Apache-2.0
"""The weights of a teacher: a folder of Hugging Face safetensors, or a checkpoint of a run.

The teacher of a run's folder is the policy that an export of that checkpoint has, not rounded to
the export's dtype. Next: jaxmoe/run/teacher.py.
"""

import dataclasses
import hashlib
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmoe.checkpoint import store
from jaxmoe.checkpoint.base import base_digest, load_base
from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.hf_placed import load_sharded_params
from jaxmoe.checkpoint.run import STAGES
from jaxmoe.checkpoint.same_run import ContentDigests, weights_digest
from jaxmoe.checkpoint.tensor_files import find_tensors
from jaxmoe.config import Config, ConfigError, DistillConfig, ModelConfig, require
from jaxmoe.model.config import read_config_json, read_hf_config
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.params import abstract_base, abstract_params, map_specs, read_dtype
from jaxmoe.model.rounded import rounding_from_config
from jaxmoe.model.weights import trained_shapes
from jaxmoe.parallel.rounding import shard_rounding
from jaxmoe.parallel.sharding import sharded_shapes
from jaxmoe.shapes import Leaf, Params

KEY = "distill.teacher"


@dataclass(frozen=True)
class TeacherFolder:
    """A teacher's folder, and the model of its weights."""

    folder: Path
    model: ModelConfig  # in the dtype and numerics of the policy
    is_packed: bool  # experts have four bits
    tokenizer: str  # as init.tokenizer
    run: Config | None = None  # of a run's folder
    stage: str = "rl"
    step: int = 0

    @property
    def checkpoint_number(self) -> int:
        """Name of the checkpoint's folder of a run."""
        return 1_000_000 * STAGES.index(self.stage) + self.step

    @property
    def summary(self) -> str:
        """Text of what is read, for the plan."""
        return f"{self.folder}, {self.stage} step {self.step}" if self.run else str(self.folder)


def find_teacher(cfg: Config) -> TeacherFolder:
    """Return the teacher of a config whose `distill.teacher` is a folder; no weight is read.

    Raises ConfigError if there is no such folder or checkpoint, or its model does not fit.
    """
    text = cfg.distill.teacher
    name, separator, number = text.rpartition("@")
    has_step = bool(separator) and not os.path.isdir(text)
    folder, step = (Path(name), number) if has_step else (Path(text), "")
    require(
        os.path.isdir(folder),  # False for a name that no file can have
        f"{KEY} must be base, a folder of weights, a run's folder, or a URL; there is no folder "
        f"{str(folder)!r:.60}. Try --set {KEY}=base.",
    )
    if (folder / "checkpoints").is_dir():
        teacher = _find_checkpoint(folder, step)
    else:
        require(
            not step,
            f"{KEY}={text} names a step, and {folder} is not a run's folder: it has no folder "
            f"'checkpoints'. Try --set {KEY}={folder}.",
        )
        require(
            not (folder / "adapter_config.json").is_file(),
            f"{KEY} must hold complete weights; {folder} has adapters. Export them with --merge, "
            "or name the run's folder.",
        )
        require(
            (folder / "config.json").is_file(),
            f"{KEY} must be a run's folder, or have config.json and *.safetensors; {folder} has "
            f"neither. Try --set {KEY}=base.",
        )
        model, has_blocks = (
            read_hf_config(folder),
            "quantization_config" in read_config_json(folder),
        )
        has_blocks = has_blocks or any(n.endswith("_blocks") for n in find_tensors(folder))
        teacher = TeacherFolder(folder, model, has_blocks, str(folder))
    model, student = teacher.model, cfg.model
    require(
        model.vocab_size == student.vocab_size,
        f"{KEY} must have the policy's vocabulary of {student.vocab_size:,} tokens; {folder} has "
        f"{model.vocab_size:,}. Try another teacher.",
    )
    require(
        model.max_context >= cfg.read_context,
        f"{KEY} must read sequences of {cfg.read_context:,} tokens; {folder} has at most "
        f"{model.max_context:,}. Try a shorter rollout.max_new_tokens.",
    )
    padding = {} if teacher.run else {"vocab_multiple": student.vocab_multiple}
    model = replace(model, dtype=student.dtype, numerics=student.numerics, **padding)
    return replace(teacher, model=model)


def _find_checkpoint(folder: Path, step: str) -> TeacherFolder:
    """Return the newest checkpoint of a run, or the one after this RL step."""
    directory = folder / "checkpoints"
    require(
        not step or step.isdecimal(),
        f"{KEY}={folder}@{step} must name an RL step by its number. Try --set {KEY}={folder}.",
    )
    saved = sorted(int(x.name) for x in directory.iterdir() if x.name.isdecimal())
    number = int(step) + 1_000_000 if step else max(saved, default=0)
    if number not in saved:
        steps = ", ".join(str(n - 1_000_000) for n in saved if n >= 1_000_000)
        raise ConfigError(
            f"{KEY}={folder}{step and '@' + step} must be a checkpoint of a run; {directory} has "
            f"those of RL steps {steps or 'none'}. Try --set {KEY}={folder}."
        )
    extra = store.restore_extra(directory, number)
    run = replace(read_saved_config(extra["config"]), workdir=str(folder))
    is_packed = bool(run.lora.ranks) and extra["stage"] == "rl"
    if is_packed:
        digests = ContentDigests(extra["contents"], base_digest(run))
        digests.check_unchanged(folder, ("base", "init.checkpoint"))
    return TeacherFolder(
        folder, run.model, is_packed, run.init.tokenizer, run, extra["stage"], extra["step"]
    )


def read_saved_config(record: Mapping[str, Any]) -> Config:
    """Return the Config that a checkpoint has as JSON; fields of other versions are left out.

    A run's own teacher is left out too, since its weights need none.
    """
    sections = {name: x for name, x in record.items() if name != DistillConfig.key}
    try:
        return _make_section(Config, sections)
    except TypeError as error:
        raise ConfigError(
            f"{KEY} must be a run of this version of jaxmoe; {error}. Export it with that version, "
            "and name the folder of the export."
        ) from error


def _make_section(section: Any, record: Mapping[str, Any]) -> Any:
    types = typing.get_type_hints(section)
    values = {}
    for field in dataclasses.fields(section):
        if field.name in record:
            value = record[field.name]
            if dataclasses.is_dataclass(types[field.name]):
                value = _make_section(types[field.name], value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return section(**values)


def teacher_shapes(teacher: TeacherFolder, mesh: Mesh | None) -> Params:
    """Return the shapes of the weights as `load_teacher` returns them, without adapters.

    On several devices experts in four bits are decoded.
    """
    model = teacher.model
    if teacher.is_packed and mesh is None:
        return abstract_base(model)
    shapes = map_specs(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, read_dtype(spec, model, "float32")), model
    )
    return sharded_shapes(shapes, model, mesh)


def load_teacher(teacher: TeacherFolder, mesh: Mesh | None) -> Params:
    """Return the weights on the device or sharded over the mesh, in the dtypes that are read.

    Raises ConfigError if they are missing or damaged, and for adapters on a mesh.
    """
    model, folder = teacher.model, teacher.folder
    if teacher.run is not None:
        return _load_policy(teacher, teacher.run, mesh)
    if mesh is not None:
        return load_sharded_params(folder, model, "as_read", mesh)
    experts = "packed" if teacher.is_packed else "dense"
    return jax.device_put(load_params(folder, model, "as_read", experts=experts))


def _load_policy(teacher: TeacherFolder, run: Config, mesh: Mesh | None) -> Params:
    adapts = bool(run.lora.ranks) and teacher.stage == "rl"
    require(
        not adapts or mesh is None,
        f"{KEY} must have complete weights on several devices; {teacher.folder} has adapters. "
        "Export them with --merge, and name the folder of the export.",
    )
    shapes = trained_shapes(run) if adapts else abstract_params(run.model, run.optim.param_dtype)
    shapes = {"policy": sharded_shapes(shapes, run.model, mesh)}
    directory = teacher.folder / "checkpoints"
    policy = store.restore_checkpoint(directory, teacher.checkpoint_number, shapes)["policy"]
    if adapts:
        lora = replace(run.lora, embedding_rows=0)
        return with_adapters(load_base(replace(run, lora=lora)), policy, lora.scales)
    if (round_params := shard_rounding(rounding_from_config(run), run.model, mesh)) is not None:
        policy = round_params(policy)

    def read_leaf(spec: Any, x: Leaf) -> Leaf:
        return x.astype(read_dtype(spec, teacher.model, x.dtype)) if hasattr(x, "dtype") else x

    return map_specs(read_leaf, teacher.model, policy)


def teacher_digest(teacher: TeacherFolder) -> str:
    """Return a digest of the weights, so that a resumed run has the same teacher."""
    if teacher.run is None:
        return weights_digest(teacher.folder)
    hasher = hashlib.sha256()
    checkpoint = teacher.folder / "checkpoints" / str(teacher.checkpoint_number)
    for path in sorted((checkpoint / "digests").rglob("*")):
        hasher.update(path.read_bytes() if path.is_file() else b"")
    return hasher.hexdigest()[:16]
