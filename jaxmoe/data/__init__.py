# SPDX-License-Identifier: Apache-2.0
"""Prompts with checkable answers: from the name of a task or a file to lists of token ids.

Read in this order: tokenizer.py, units.py, number_words.py, exact_number.py, boxed_formula.py,
marked_answer.py, scoring.py, rows.py, gym.py, json_columns.py, row_tools.py, chat_turns.py,
cells.py, files.py, overlong.py, file_split.py, sources.py, chat_template.py, harmony_header.py,
harmony.py, harmony_render.py, json_schema_types.py, harmony_tools.py, templates.py, pipeline.py.
"""
