# SPDX-License-Identifier: Apache-2.0
"""gptoss20b.py with experts that are sampled, trained and exported in four bits, eight devices.

COMMAND  python -m jaxmoe.train --config gptoss20b_mxfp4.py --dry-run
EXPECT   71.4 GB per device in training, 35.5 GB while sampling, by the dry run's arithmetic. It
         has not been trained.
SOURCE   gptoss20b.py, whose sizes and rates it keeps. At its rate of 1e-6 masters that begin at a
         code do not reach the next one within the run, so rounding is stochastic:
         docs/quantised.md.
"""

from dataclasses import replace

from jaxmoe.config import Config, QuantConfig
from jaxmoe.configs import gptoss20b


def get_config() -> Config:
    full = gptoss20b.get_config()
    return replace(
        full,
        quant=QuantConfig(experts="mxfp4", rounding="stochastic"),
        save=replace(full.save, export_dtype="mxfp4"),
        workdir="runs/gptoss20b_mxfp4",
    )
