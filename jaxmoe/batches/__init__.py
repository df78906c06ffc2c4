# SPDX-License-Identifier: Apache-2.0
"""Rollouts as the arrays of one step: batches, microbatches, packed rows, and shared prompts.

Read in this order: batch.py, engine_experts.py, microbatches.py, shared_prompts.py,
sharing_from_config.py, computed_tokens.py.
"""
