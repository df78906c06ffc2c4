# SPDX-License-Identifier: Apache-2.0
"""Weight transfer engines for vLLM: a weight update is checked, then loaded, then verified.

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
from jaxmoe.vllm_plugin.loaded_state import ExpectedParameter, LoadedState
from jaxmoe.vllm_plugin.loading import Stream, Take, reload
from jaxmoe.vllm_plugin.manifest import Manifest, UpdateRejected
from jaxmoe.vllm_plugin.names import checkpoint_shapes, parameter_of


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Files and mailboxes need no introduction."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where a weight update lies: a directory, or a key of tensor_mailbox.py."""

    path: str = field(default="")
    mailbox: str = field(default="")


class VerifiedTransfer:
    """What all transports share; they differ in how tensors arrive."""

    loaded_state: LoadedState
    model: Any
    model_config: Any
    vllm_config: Any

    def check(self, expected: Manifest) -> None:
        """Raises UpdateRejected where the model cannot take these weights."""
        config = self.model_config.hf_text_config
        kind = getattr(config, "model_type", None)
        if kind != "gpt_oss":
            raise UpdateRejected(f"weights {expected.label} are GPT-OSS; vLLM serves {kind!r}.")
        if self.vllm_config.quant_config is not None:
            raise UpdateRejected(
                f"weights {expected.label} are rejected: vLLM holds quantised weights. Start it "
                "from an export in bfloat16 or float32."
            )
        manifest.check_model(expected, checkpoint_shapes(vars(config)))

    @contextmanager
    def receiving(
        self, expected: Manifest, summed: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[Take]:
        """Gives what loads the manifest's tensors; in the end records what came of them.

        `summed` are digests of tensors that were read before, of the same memory.
        Raises UpdateRejected where they were not what the manifest says: no label stands for the
        model's weights then, until an update succeeds.
        """
        forms = stored_forms(self.model, self.vllm_config.parallel_config)
        before = {} if all(exact for _, exact in forms.values()) else digests(self.model)[0]
        arrivals = ReceivedTensors(expected, forms, summed)
        self.loaded_state.invalidate()
        with reload(self.model, self.model_config) as take:
            yield lambda stream: take(arrivals.watch(stream))
        arrivals.reject_unless_whole()
        self.loaded_state.record(
            expected.label, arrivals.received, arrivals.parameters, before, *digests(self.model)
        )


class ReceivedTensors:
    """Tensors as they pass, compared with their manifest."""

    def __init__(
        self, expected: Manifest, forms: Mapping[str, tuple[Form, bool]], summed: Mapping[str, str]
    ) -> None:
        self.received: dict[str, str] = {}
        self.parameters: dict[str, ExpectedParameter] = {}
        self._expected, self._forms, self._summed = expected, forms, summed
        self._problems: list[str] = []

    def watch(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream without what cannot be loaded; it is never cut short, a sender may wait.

        A sender that sums while it sends has no digests in its manifest: it compares `received`.
        """
        for name, tensor in stream:
            said = self._expected.tensors.get(name)
            if said is None or said.shape != tuple(tensor.shape):
                self._problems.append(f"{name} {list(tensor.shape)} is not in the manifest")
                continue
            got = self.received[name] = self._summed.get(name) or digest_tensor(tensor)
            if said.digest not in ("", got):
                self._problems.append(differs(said.digest, name, got))
            form, exact = self._forms.get(parameter_of(name), (torch.Tensor.detach, False))
            became = form(tensor)
            same = became.dtype == tensor.dtype and became.data_ptr() == tensor.data_ptr()
            became_digest = got if same else digest_tensor(became)
            self.parameters[name] = ExpectedParameter(became_digest, exact)
            yield name, tensor

    def reject_unless_whole(self) -> None:
        """Raises UpdateRejected where a tensor was not the manifest's, or never came."""
        missing = self._expected.tensors.keys() - self.received.keys()
        never = [f"{name} never came" for name in self._expected.tensors if name in missing]
        manifest.reject(self._expected.label, self._problems + never)


class FileTransfer(VerifiedTransfer, WeightTransferEngine[InitInfo, UpdateInfo]):
    """Backend "jaxmoe": weight updates in files, or handed over in this process."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loaded_state = LoadedState()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to meet: files lie where update_info says."""

    def start_weight_update(self) -> None:
        """Nothing yet: an update that is rejected must leave the model as it is."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check and load one whole weight update. Raises UpdateRejected, naming tensors."""
        if update_info.path:
            directory = Path(update_info.path)
            manifest.check_folder(directory)
            expected = manifest.read(directory)
            self.check(expected)
            manifest.check_files(expected, directory)
            with self.receiving(expected, check_bytes(expected, directory)) as take:
                take(_read(expected, directory))
            return
        mail = tensor_mailbox.take(update_info.mailbox)
        if mail is None:
            raise UpdateRejected(
                f"update_info must name a path, or a mailbox of this process; got {update_info}."
            )
        expected = manifest.parse(mail[0], f"mailbox {update_info.mailbox}")
        self.check(expected)
        with self.receiving(expected) as take:
            take(mail[1])

    def finish_weight_update(self) -> None:
        """Nothing left: the model is whole again as soon as an update is received."""

    def shutdown(self) -> None:
        """Nothing stays open between updates."""


def differs(said: str, name: str, got: str) -> str:
    return f"{name} must have digest {said}, as read it has {got}"


def check_bytes(expected: Manifest, directory: Path) -> dict[str, str]:
    """The digests as read. Raises UpdateRejected, naming tensors, where they are others."""
    tensors = dict(_read(expected, directory))
    with ThreadPoolExecutor() as pool:
        got = dict(zip(tensors, pool.map(digest_tensor, tensors.values()), strict=True))
    said = {name: tensor.digest for name, tensor in expected.tensors.items()}
    wrong = [differs(said[name], name, got[name]) for name in said if said[name] != got[name]]
    manifest.reject(expected.label, wrong)
    return got


def _read(expected: Manifest, directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an update's files, mapped and not copied, in the manifest's order."""
    files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}
    for name in expected.tensors:
        yield name, where[name].get_tensor(name)
