# SPDX-License-Identifier: Apache-2.0
"""Instructions whose following a program can check, added to questions and rewarded.

Next: checkers.py checks answers; choice.py chooses instructions; reward.py is the reward function.
"""

from jaxmoe.graders.instructions.choice import add_instructions
from jaxmoe.graders.instructions.reward import score_instructions

__all__ = ["add_instructions", "score_instructions"]
