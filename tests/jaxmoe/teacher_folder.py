# SPDX-License-Identifier: Apache-2.0
"""A folder of a teacher's weights, without a run that learned them."""

from pathlib import Path

from jaxmoe.checkpoint.hf import save_params
from jaxmoe.config_file import load_config, override
from jaxmoe.data.tokenizer import write_byte_tokenizer
from jaxmoe.shapes import Params
from tests.jaxmoe.random_weights import random_weights

MODEL = override(load_config("tiny.py"), "model.d_model=32", "model.d_expert=48").model


def draw_weights() -> Params:
    """Return the weights that `write_teacher` writes."""
    return random_weights(MODEL, 3)


def write_teacher(folder: Path) -> Path:
    """Write a small model with the tokenizer of tiny.py; return its folder."""

    def add_files(directory: Path) -> None:
        write_byte_tokenizer(directory)

    save_params(draw_weights(), MODEL, folder, dtype="float32", add_files=add_files)
    return folder
