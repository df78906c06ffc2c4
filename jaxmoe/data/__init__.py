# SPDX-License-Identifier: Apache-2.0
"""Prompts with checkable answers, from a task's name or a file to lists of token ids.

Read in this order: tokenizer.py, scoring.py, rows.py, gym.py, files.py, sources.py,
pipeline.py.
"""
