# SPDX-License-Identifier: Apache-2.0
"""Weight transfer engines for vLLM: a publication is checked, then loaded, then looked at.

Nothing of the model is touched before every check that can come first has passed: sizes of the
model, headers, and for files the digest of every tensor. Until then vLLM goes on with what it has.
Next: loading.py.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from jaxmoe.vllm_plugin import manifest, tensor_mailbox
from jaxmoe.vllm_plugin.live import Form, digest_tensor, digests, stored_forms
from jaxmoe.vllm_plugin.loaded_state import Fed, LoadedState
from jaxmoe.vllm_plugin.loading import Stream, Take, reload
from jaxmoe.vllm_plugin.manifest import Manifest, Refused
from jaxmoe.vllm_plugin.names import checkpoint_shapes, feeds


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Files and mailboxes need no introduction."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where a publication lies: a directory, or a key of tensor_mailbox.py."""

    path: str = field(default="")
    mailbox: str = field(default="")


class Publications:
    """The part that all our engines share; they differ in how tensors arrive."""

    held: LoadedState
    model: Any
    model_config: Any
    vllm_config: Any

    def check(self, asked: Manifest) -> None:
        """Raises Refused where the model cannot take these weights."""
        config = self.model_config.hf_text_config
        kind = getattr(config, "model_type", None)
        if kind != "gpt_oss":
            raise Refused(f"weights {asked.label} are GPT-OSS; the engine serves {kind!r}.")
        if self.vllm_config.quant_config is not None:
            raise Refused(
                f"weights {asked.label} are refused: the engine holds quantised weights. Start "
                "vLLM from an export in bfloat16 or float32."
            )
        manifest.check_model(asked, checkpoint_shapes(vars(config)))

    @contextmanager
    def publication(
        self, asked: Manifest, summed: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[Take]:
        """Gives what takes the manifest's tensors; in the end writes down what came of them.

        `summed` are digests of tensors that were read before, of the same memory.
        Raises Refused where they were not what the manifest says: no label stands for the
        model's weights then, until a publication succeeds.
        """
        forms = stored_forms(self.model, self.vllm_config.parallel_config)
        before = {} if all(exact for _, exact in forms.values()) else digests(self.model)[0]
        arrivals = Arrivals(asked, forms, summed)
        self.held.torn()
        with reload(self.model, self.model_config) as take:
            yield lambda stream: take(arrivals.watch(stream))
        arrivals.refuse_unless_whole()
        self.held.publish(
            asked.label, arrivals.received, arrivals.fed, before, *digests(self.model)
        )


class Arrivals:
    """Tensors as they pass, compared with their manifest."""

    def __init__(
        self, asked: Manifest, forms: Mapping[str, tuple[Form, bool]], summed: Mapping[str, str]
    ) -> None:
        self.received: dict[str, str] = {}
        self.fed: dict[str, Fed] = {}
        self._asked, self._forms, self._summed = asked, forms, summed
        self._problems: list[str] = []

    def watch(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream without what cannot be loaded; it is never cut short, a sender may wait.

        A sender that sums while it sends has no digests in its manifest: it compares `received`.
        """
        for name, tensor in stream:
            said = self._asked.tensors.get(name)
            if said is None or said.shape != tuple(tensor.shape):
                self._problems.append(f"{name} {list(tensor.shape)} is not in the manifest")
                continue
            got = self.received[name] = self._summed.get(name) or digest_tensor(tensor)
            if said.digest not in ("", got):
                self._problems.append(differs(said.digest, name, got))
            form, exact = self._forms.get(feeds(name), (torch.Tensor.detach, False))
            became = form(tensor)
            same = became.dtype == tensor.dtype and became.data_ptr() == tensor.data_ptr()
            self.fed[name] = Fed(got if same else digest_tensor(became), exact)
            yield name, tensor

    def refuse_unless_whole(self) -> None:
        """Raises Refused where a tensor was not the manifest's, or never came."""
        never = [f"{name} never came" for name in self._asked.tensors if name not in self.received]
        manifest.refuse(self._asked.label, self._problems + never)


class Files(Publications, WeightTransferEngine[InitInfo, UpdateInfo]):
    """Backend "jaxmoe": publications in files, or handed over in this process."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held = LoadedState()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to meet: files lie where update_info says."""

    def start_weight_update(self) -> None:
        """Nothing yet: a publication that is refused must leave the model as it is."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check and load one whole publication. Raises Refused, naming tensors."""
        if update_info.path:
            directory = Path(update_info.path)
            asked = manifest.read(directory)
            self.check(asked)
            manifest.check_files(asked, directory)
            with self.publication(asked, _check_bytes(asked, directory)) as take:
                take(_read(asked, directory))
            return
        left = tensor_mailbox.take(update_info.mailbox)
        if left is None:
            raise Refused(
                f"update_info must name a path, or a mailbox of this process; got {update_info}."
            )
        asked = manifest.parse(left[0], f"mailbox {update_info.mailbox}")
        self.check(asked)
        with self.publication(asked) as take:
            take(left[1])

    def finish_weight_update(self) -> None:
        """Nothing left: the model is whole again as soon as a publication is received."""

    def shutdown(self) -> None:
        """Nothing is held open between publications."""


def differs(said: str, name: str, got: str) -> str:
    return f"{name} must have digest {said}, as read it has {got}"


def _check_bytes(asked: Manifest, directory: Path) -> dict[str, str]:
    """The digests as read. Raises Refused, naming them, for tensors unlike the manifest's."""
    tensors = dict(_read(asked, directory))
    with ThreadPoolExecutor() as pool:
        got = dict(zip(tensors, pool.map(digest_tensor, tensors.values()), strict=True))
    said = {name: tensor.digest for name, tensor in asked.tensors.items()}
    wrong = [differs(said[name], name, got[name]) for name in said if said[name] != got[name]]
    manifest.refuse(asked.label, wrong)
    return got


def _read(asked: Manifest, directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a publication's files, mapped and not copied, in the manifest's order."""
    files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}
    for name in asked.tensors:
        yield name, where[name].get_tensor(name)
