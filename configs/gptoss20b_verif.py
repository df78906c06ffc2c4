# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by GRPO on instructions that programs and a judge check, as in VerIF, eight devices.

Programs check the instructions behind each question, and a model at an OpenAI-compatible endpoint
judges the answer; half of the reward comes from each. Name your judge's url and model below, and
put your own questions into data.task.

COMMAND  python -m jaxmoe.train --config gptoss20b_verif.py --dry-run
EXPECT   73.6 GB per device in training, 39.1 GB while sampling, by the dry run's arithmetic. It
         has not been trained.
SOURCE   gptoss20b.py and what it cites; checks by programs together with a judge:
         arXiv:2506.09942. The weights of the two are not measured here.
"""

from dataclasses import replace

from jaxmoe.config import Config
from jaxmoe.configs import gptoss20b


def get_config() -> Config:
    full = gptoss20b.get_config()
    return replace(
        full,
        data=replace(
            full.data,
            map_rows="jaxmoe.graders.instructions:add_instructions(at_most=3)",
            rewards=(
                "0.5 * jaxmoe.graders.instructions:score_instructions"
                " + 0.5 * jaxmoe.graders.judge:score_by_judge(url='http://localhost:8100/v1', "
                "model='judge')"
            ),
            system="",
        ),
        workdir="runs/gptoss20b_verif",
    )
