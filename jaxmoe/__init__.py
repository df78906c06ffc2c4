# SPDX-License-Identifier: Apache-2.0
"""jaxmoe: GPT-OSS trained by reinforcement learning in pure-functional JAX.

Importing this package touches no device. The command starts in jaxmoe/train.py.
"""

__version__ = "0.1.0"
