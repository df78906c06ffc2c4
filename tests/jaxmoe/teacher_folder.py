# SPDX-License-Identifier: Apache-2.0
"""A folder of a teacher's weights, without a run that learned them."""

from pathlib import Path

from jaxmoe.checkpoint.hf import save_params
from jaxmoe.config_file import load_config, override
from jaxmoe.data.tokenizer import write_byte_tokenizer
from tests.jaxmoe.random_weights import random_weights


def write_teacher(folder: Path) -> Path:
    """Write a small model with the tokenizer of tiny.py; return its folder."""
    model = override(load_config("tiny.py"), "model.d_model=32", "model.d_expert=48").model
    params = random_weights(model, 3)

    def add_files(directory: Path) -> None:
        write_byte_tokenizer(directory)

    save_params(params, model, folder, dtype="float32", add_files=add_files)
    return folder
