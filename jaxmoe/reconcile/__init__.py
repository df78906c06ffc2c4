# SPDX-License-Identifier: Apache-2.0
"""The causes of a log-prob gap between engine and trainer. Start with compare.py."""
