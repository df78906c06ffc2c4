# SPDX-License-Identifier: Apache-2.0
"""Weight transfer engines for vLLM: a weight update is checked, then loaded, then verified.

Nothing of the model is changed before all checks that need no loading have passed: the model's
sizes, headers, and for files the digest of every tensor. Until then vLLM keeps its weights. Next:
loading.py.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from jaxmoe.vllm.plugin import manifest, tensor_mailbox
from jaxmoe.vllm.plugin.live_parameters import (
    Form,
    digest_parameters,
    digest_tensor,
    make_live_forms,
)
from jaxmoe.vllm.plugin.loaded_state import ExpectedParameter, LoadedState
from jaxmoe.vllm.plugin.loading import LoadTensors, TensorStream, reload_model
from jaxmoe.vllm.plugin.manifest import Manifest, ManifestTensor, UpdateRejected
from jaxmoe.vllm.plugin.names import PACKED_ENDS, checkpoint_shapes, vllm_parameter_name
from jaxmoe.vllm.plugin.received_bytes import ReceivedBytes

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: files and mailboxes need no initialization."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The location of a weight update: a directory, or a key of tensor_mailbox.py."""

    path: str = field(default="")
    # folders with the changes since the one before, first `path`; None: none will follow either
    changes: list[str] | None = field(default=None)
    mailbox: str = field(default="")


class VerifiedTransfer:
    """The common part of all transports; they differ in how tensors arrive."""

    loaded_state: LoadedState
    model: Any
    model_config: Any
    vllm_config: Any

    def check_model(self, expected: Manifest) -> None:
        """Raise UpdateRejected if the model cannot take these weights."""
        config = self.model_config.hf_text_config
        kind = getattr(config, "model_type", None)
        if kind != "gpt_oss":
            raise UpdateRejected(f"weights {expected.label} are GPT-OSS; vLLM serves {kind!r}.")
        holds = name_expert_format(self.vllm_config.quant_config)
        sent = "mxfp4" if any(name.endswith(PACKED_ENDS) for name in expected.tensors) else "dense"
        if holds == "other":
            raise UpdateRejected(
                f"weights {expected.label} are rejected: vLLM's weights are quantised. Start it "
                "from an export in bfloat16, float32 or mxfp4."
            )
        if holds != sent:
            raise UpdateRejected(
                f"weights {expected.label} are rejected: vLLM's experts are {holds}, those of the "
                f"update {sent}. Start it from an export with save.export_dtype="
                f"{'mxfp4' if sent == 'mxfp4' else 'bfloat16'}."
            )
        manifest.check_tensor_shapes(
            expected, checkpoint_shapes(vars(config), packed=sent == "mxfp4")
        )

    @contextmanager
    def load_verified(
        self, expected: Manifest, known_digests: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[LoadTensors]:
        """Yield a function that loads the manifest's tensors; at the end verify and record them.

        `known_digests` are digests of tensors that were read before, from the same memory. Raises
        UpdateRejected if the tensors differ from the manifest; the model's weights then have no
        label until an update succeeds.
        """
        # Read before the reload, in which the parameters become empty shapes.
        forms = make_live_forms(self.model, self.vllm_config.parallel_config)
        all_exact = all(exact for _, exact in forms.values())
        # Without an exact form, the change of a parameter is the evidence that it was loaded.
        before = {} if all_exact else digest_parameters(self.model)[0]
        arrivals = ReceivedTensors(expected, forms, known_digests)
        self.loaded_state.invalidate()
        with reload_model(self.model, self.model_config) as load_tensors:
            yield lambda stream: load_tensors(arrivals.check_stream(stream))
        arrivals.check_complete()
        self.loaded_state.record_update(
            expected.label,
            arrivals.received,
            arrivals.parameters,
            before,
            *digest_parameters(self.model),
        )


class ReceivedTensors:
    """Tensors of one update, compared with its manifest while they pass."""

    def __init__(
        self,
        expected: Manifest,
        forms: Mapping[str, tuple[Form, bool]],
        known_digests: Mapping[str, str],
    ) -> None:
        self.received: dict[str, str] = {}
        self.parameters: dict[str, ExpectedParameter] = {}
        self._expected, self._forms, self._known_digests = expected, forms, known_digests
        self._problems: list[str] = []

    def check_stream(self, stream: TensorStream) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that can be loaded; reads the complete stream, as a sender may wait.

        A sender that digests while it sends has no digests in its manifest: it compares `received`.
        """
        for name, tensor in stream:
            expected = self._expected.tensors.get(name)
            if expected is None or expected.shape != tuple(tensor.shape):
                self._problems.append(f"{name} {list(tensor.shape)} is not in the manifest")
                continue
            digest = self.received[name] = self._known_digests.get(name) or digest_tensor(tensor)
            if expected.digest not in ("", digest):
                self._problems.append(format_digest_mismatch(expected.digest, name, digest))
            form, exact = self._forms.get(vllm_parameter_name(name), (torch.Tensor.detach, False))
            live_tensor = form(tensor)
            # A form that changes nothing returns the same memory, whose digest is known.
            unchanged = live_tensor.dtype == tensor.dtype
            unchanged = unchanged and live_tensor.data_ptr() == tensor.data_ptr()
            live_digest = digest if unchanged else digest_tensor(live_tensor)
            self.parameters[name] = ExpectedParameter(live_digest, exact)
            yield name, tensor

    def check_complete(self) -> None:
        """Raise UpdateRejected if a tensor differed from the manifest or did not arrive."""
        missing = self._expected.tensors.keys() - self.received.keys()
        problems = [f"{name} did not arrive" for name in self._expected.tensors if name in missing]
        manifest.reject_problems(self._expected.label, self._problems + problems)


class FileTransfer(VerifiedTransfer, WeightTransferEngine[InitInfo, UpdateInfo]):
    """Backend "jaxmoe": weight updates in files, or handed over in this process."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loaded_state = LoadedState()
        self._received_bytes = ReceivedBytes()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: update_info names the files."""

    def start_weight_update(self) -> None:
        """Do nothing: an update that is rejected must leave the model unchanged."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check and load one complete weight update. Raises UpdateRejected, naming tensors."""
        if update_info.path:
            folders = [Path(path) for path in (update_info.path, *(update_info.changes or ()))]
            for folder in folders:
                manifest.check_folder_owner(folder)
            expected = manifest.read_manifest(folders[-1])
            self.check_model(expected)
            try:
                if update_info.changes is None:
                    tensors = dict(read_tensors(expected, folders[0]))
                else:
                    raw = self._received_bytes.read(folders)
                    tensors = {n: view_bytes(raw[n], t) for n, t in expected.tensors.items()}
                digests = check_digests(expected, tensors)
            except BaseException:
                self._received_bytes.forget()
                raise
            with self.load_verified(expected, digests) as load_tensors:
                load_tensors(tensors.items())
            return
        mail = tensor_mailbox.pop_update(update_info.mailbox)
        if mail is None:
            raise UpdateRejected(
                f"update_info must name a path, or a mailbox of this process; got {update_info}."
            )
        expected = manifest.parse_manifest(mail[0], f"mailbox {update_info.mailbox}")
        self.check_model(expected)
        with self.load_verified(expected) as load_tensors:
            load_tensors(mail[1])

    def finish_weight_update(self) -> None:
        """Do nothing: the model is complete as soon as an update has been received."""

    def shutdown(self) -> None:
        """Do nothing: no resources stay open between updates."""


def name_expert_format(quant_config: Any) -> str:
    """Return how a vLLM holds experts: dense, mxfp4 in its own kernels' form, or other."""
    if quant_config is None:
        return "dense"
    # GPT-OSS's is named gpt_oss_mxfp4 in vLLM 0.32.
    return "mxfp4" if str(quant_config.get_name()).endswith("mxfp4") else "other"


def view_bytes(raw: np.ndarray, expected: ManifestTensor) -> torch.Tensor:
    """Return a tensor over these bytes. Raises UpdateRejected if their number is another."""
    dtype = TORCH_DTYPES[expected.dtype]
    if raw.nbytes != math.prod(expected.shape) * dtype.itemsize:
        raise UpdateRejected(f"a tensor has {raw.nbytes} bytes, its manifest is {expected}.")
    return torch.from_numpy(raw).view(dtype).reshape(expected.shape)


def format_digest_mismatch(expected: str, name: str, actual: str) -> str:
    return f"{name} must have digest {expected}, has {actual}"


def check_digests(expected: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digests of tensors. Raises UpdateRejected, naming those that differ."""
    with ThreadPoolExecutor() as pool:
        actual = dict(zip(tensors, pool.map(digest_tensor, tensors.values()), strict=True))
    declared = {name: tensor.digest for name, tensor in expected.tensors.items()}
    problems = [
        format_digest_mismatch(declared[name], name, actual[name])
        for name in declared
        if declared[name] != actual[name]
    ]
    manifest.reject_problems(expected.label, problems)
    return actual


def read_tensors(expected: Manifest, directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an update's files, mapped and not copied, in the manifest's order.

    Raises UpdateRejected if the files' headers differ from the manifest.
    """
    manifest.check_file_headers(expected, directory)
    files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
    files_by_name = {name: file for file in files for name in file.keys()}
    for name in expected.tensors:
        yield name, files_by_name[name].get_tensor(name)
