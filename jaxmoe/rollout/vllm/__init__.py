# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine: engine.py is the trainer's side, plugin/ runs inside vLLM's processes."""
