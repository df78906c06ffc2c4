# SPDX-License-Identifier: Apache-2.0
"""Transport of the trainer's weights to an engine; every transport returns an update.py object.

Nothing here imports a part of vLLM. checksum.py also runs inside vLLM's processes, without jax.
"""
