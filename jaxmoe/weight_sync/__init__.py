# SPDX-License-Identifier: Apache-2.0
"""The trainer's weights on their way to an engine: update.py is what every transport makes.

Nothing here imports a part of vLLM; checksum.py is also read inside vLLM's processes, without jax.
"""
