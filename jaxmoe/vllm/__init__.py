# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine: the trainer's side, its client, the plugin inside vLLM."""
