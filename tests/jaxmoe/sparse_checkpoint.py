# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder of any size that takes no room: headers as released, and holes for data."""

import json
from pathlib import Path

from jaxmoe.checkpoint.entries import planned_tensors
from jaxmoe.checkpoint.tensor_files import SINGLE_FILE, encode_header, planned_bytes
from jaxmoe.config import ModelConfig
from jaxmoe.model.config import to_hf


def write_sparse_checkpoint(folder: Path, model: ModelConfig, dtype: str = "mxfp4") -> None:
    """Write config.json, and one file of tensors whose data are zeros without blocks on disk."""
    (folder / "config.json").write_text(json.dumps(to_hf(model, dtype="bfloat16")))
    planned = planned_tensors(model, dtype)
    with open(folder / SINGLE_FILE, "wb") as file:
        file.write(encode_header(planned))
        file.truncate(file.tell() + sum(map(planned_bytes, planned)))
