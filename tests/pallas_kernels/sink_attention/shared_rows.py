# SPDX-License-Identifier: Apache-2.0
"""Rows in which the answers of a prompt share its keys."""

import numpy as np


def shared_places(length, rows):
    """Positions, segments and last segments of rows of groups, each int32 [B, length]."""
    places = np.zeros((3, len(rows), length), np.int32)
    for b, groups in enumerate(rows):
        column = node = 0
        for prompt, answers in groups:
            root, node = node + 1, node + 1 + len(answers)
            parts = [(prompt, 0, root, node)]
            parts += [(n, prompt, root + 1 + i, root + 1 + i) for i, n in enumerate(answers)]
            for n, start, segment, last in parts:
                places[0, b, column : column + n] = np.arange(start, start + n)
                places[1:, b, column : column + n] = [[segment], [last]]
                column += n
    return places
