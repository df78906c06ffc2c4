# SPDX-License-Identifier: Apache-2.0
"""Prompts with checkable answers: from the name of a task or a file to lists of token ids.

Read in this order: tokenizer.py, rows.py, gym.py, json_columns.py, row_tools.py, chat_turns.py,
cells.py, row_changes.py, task_files.py, files.py, overlong.py, file_split.py, sources.py,
chat_template.py, harmony/header.py, harmony/parse.py, harmony/render.py, json_schema_types.py,
harmony/tools.py, templates.py, pipeline.py.
"""
