# SPDX-License-Identifier: Apache-2.0
"""Why engine and trainer differ on the same tokens: compare.py is where to begin."""
