# SPDX-License-Identifier: Apache-2.0
"""The second model of a run: its forward and its weights.

A run whose teacher is the policy before RL has none. Next: jaxmoe/checkpoint/teacher_weights.py
reads the weights; jaxmoe/rl/distillation.py has the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxmoe.checkpoint.teacher_weights import (
    KEY,
    TeacherFolder,
    find_teacher,
    load_teacher,
    teacher_digest,
)
from jaxmoe.config import Config, ConfigError, RouterConfig, require
from jaxmoe.data.same_tokenizer import find_tokenizer_difference
from jaxmoe.data.tokenizer import load_tokenizer
from jaxmoe.model import make_ops
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.rl.scorer import Scorer
from jaxmoe.shapes import Params
from jaxmoe.vllm.client.teacher import TeacherServer, open_teacher_server
from pallas_kernels.dispatch import Impl


@dataclass(frozen=True)
class Teacher:
    """A second model, whose weights are not loaded yet."""

    folder: TeacherFolder
    scorer: Scorer
    mesh: Mesh | None

    def load(self) -> Params:
        """Return the weights, as the step takes them."""
        return load_teacher(self.folder, self.mesh)

    def digest(self) -> dict[str, str]:
        """Return the digest of the weights by its key in a checkpoint."""
        return {KEY: teacher_digest(self.folder)}


def make_teacher(
    cfg: Config, impls: Mapping[str, Impl] | None = None, mesh: Mesh | None = None
) -> Teacher | None:
    """Return the teacher of a config, if it is a folder; None otherwise.

    It routes by the top-k of GPT-OSS, whatever the policy's router is.
    Raises ConfigError if the folder, its model or its tokenizer does not fit the run.
    """
    if not cfg.distill.has_folder:
        return None
    folder = find_teacher(cfg)
    check_teacher_tokenizer(cfg, folder)
    plain_ops = make_ops(replace(cfg, router=RouterConfig()), impls)
    ops = sharded_ops(plain_ops, mesh, folder.model, method=cfg.mesh.attention)
    return Teacher(folder, Scorer(folder.model, ops, cfg.rollout.temperature), mesh)


def open_teacher(
    cfg: Config, impls: Mapping[str, Impl], mesh: Mesh | None
) -> Teacher | TeacherServer | None:
    """Return the teacher of a run: `make_teacher`, or a server that answers."""
    if not cfg.distill.is_url:
        return make_teacher(cfg, impls, mesh)
    require(
        jax.process_count() == 1,
        f"{KEY}={cfg.distill.teacher} needs a run in one process: others could get other log-probs "
        f"for the same tokens. Try --set {KEY}=DIRECTORY with the teacher's weights.",
    )
    return open_teacher_server(cfg)


def check_teacher_tokenizer(cfg: Config, teacher: TeacherFolder) -> None:
    """Raise ConfigError unless the teacher's tokenizer does what the run's does."""
    spec = teacher.tokenizer
    file = Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)
    require(
        spec == "bytes" or file.is_file(),
        f"{KEY} must have the policy's tokenizer, and {teacher.folder} needs one to compare: there "
        f"is no {file}. Copy the tokenizer.json of the teacher there.",
    )
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    if problem := find_tokenizer_difference(tokenizer, load_tokenizer(spec)):
        raise ConfigError(
            f"{KEY} must have the policy's tokenizer, {cfg.init.tokenizer}; that of "
            f"{teacher.folder} differs: {problem}. Try another teacher."
        )
