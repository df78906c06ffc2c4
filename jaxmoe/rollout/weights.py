# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to an engine: a publication is what one version is announced with.

Every way takes the same arguments and returns a `Publication`:

    files(params, cfg, directory, *, dtype, run, version) -> Publication        (here)
    shared(params, cfg, *, dtype, run, version)           in process, weights_shared.py
    broadcast(group, params, cfg, *, dtype, run, version) NCCL, weights_nccl.py
    handles(params, cfg, *, dtype, run, version)          CUDA IPC, weights_ipc.py

    with files(params, cfg, directory, dtype="float32", run=run, version=3) as published:
        post("update_weights", {"update_info": published.update_info})   # published.send() beside
        held["received"] == published.digests      # after send() and the update have both ended

Next: jaxmoe/rollout/vllm/publish.py hands it over and checks what the engine then holds.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxmoe.checkpoint.hf import iter_hf, planned_tensors
from jaxmoe.checkpoint.tensor_files import SINGLE, Planned, write_shard
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.rollout.checksum import digest
from jaxmoe.shapes import Params

FORMAT = 1  # of the manifest
DTYPES = ("bfloat16", "float32")  # vLLM's GPT-OSS takes packed experts at start-up only


def _nothing() -> None:
    """Files and shared arrays are there already."""


@dataclass(frozen=True)
class Publication:
    """One version of the weights, ready to be fetched by an engine.

    `manifest` is {"format", "run", "version", "tensors": {name: {"dtype", "shape", "digest"}}}.
    `send` must run beside the engine's update_weights, in a thread of its own, and returns when
    the last tensor has left; only then are all digests in the manifest. It does nothing for
    files. `close` removes what was written; it may be called twice.
    """

    manifest: dict[str, Any]
    update_info: dict[str, Any]
    send: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing

    @property
    def label(self) -> str:
        """What the engine calls this version: "<run>:<version>"."""
        return f"{self.manifest['run']}:{self.manifest['version']}"

    @property
    def digests(self) -> dict[str, str]:
        return {name: tensor["digest"] for name, tensor in self.manifest["tensors"].items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def new_run() -> str:
    """A name that no other engine object has: 12 random hex digits."""
    return secrets.token_hex(6)


def empty_manifest(planned: list[Planned], run: str, version: int) -> dict[str, Any]:
    tensors = {n: {"dtype": d, "shape": list(s), "digest": ""} for n, d, s in planned}
    return {"format": FORMAT, "run": run, "version": version, "tensors": tensors}


def files(
    params: Params, cfg: ModelConfig, directory: str | Path, *, dtype: str, run: str, version: int
) -> Publication:
    """Write `directory`/jaxmoe-<run>/<version>/ with model.safetensors and manifest.json.

    Written aside and renamed, so that the folder is whole or absent; an older one of the same
    version is replaced.
    Raises ConfigError where the directory is full or cannot be written.
    """
    home = Path(directory) / f"jaxmoe-{run}"
    final, aside = home / str(version), home / f"{version}.partial"
    planned = planned_tensors(cfg, dtype)
    manifest = empty_manifest(planned, run, version)

    def summed():
        for name, array in iter_hf(params, cfg, dtype):
            manifest["tensors"][name]["digest"] = digest(array)
            yield name, array

    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write_shard(aside / SINGLE, planned, summed())
        (aside / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
    except OSError as error:
        raise ConfigError(
            f"rollout.vllm.weights_dir ({directory}) must have room for the weights; {error}. "
            "Try --set rollout.vllm.weights_dir=FOLDER with one that has."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)

    def remove() -> None:
        shutil.rmtree(final, ignore_errors=True)
        try:
            home.rmdir()
        except OSError:  # another version is still there
            pass

    return Publication(manifest, {"path": str(final)}, close=remove)
