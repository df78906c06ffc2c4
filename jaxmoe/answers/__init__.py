# SPDX-License-Identifier: Apache-2.0
"""Short answers in text: the answer that a response marks, its exact value, and if it is correct.

Read in this order: units.py, number_words.py, exact_number.py, boxed_formula.py, marked_answer.py,
scoring.py.
"""
