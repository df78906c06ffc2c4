# SPDX-License-Identifier: Apache-2.0
"""tiny.py with experts that are sampled, trained and exported in four bits.

COMMAND  python -m jaxmoe.train --config tiny_mxfp4.py
EXPECT   Not yet measured over its 120 steps.
SOURCE   tiny.py, whose sizes and rates it keeps.
"""

from dataclasses import replace

from configs import tiny
from jaxmoe.config import Config, QuantConfig


def get_config() -> Config:
    full = tiny.get_config()
    return replace(
        full,
        quant=QuantConfig(experts="mxfp4"),
        save=replace(full.save, export_dtype="mxfp4"),
        workdir="runs/tiny_mxfp4",
    )
