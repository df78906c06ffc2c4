# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine, the trainer's side. Next: vllm_engine.py; ../plugin/ runs inside vLLM."""
