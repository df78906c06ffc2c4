# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine, the trainer's side: engine.py; jaxmoe/vllm_plugin/ runs inside vLLM."""
