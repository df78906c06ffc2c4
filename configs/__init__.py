# SPDX-License-Identifier: Apache-2.0
"""Shipped configurations: one file each, found by name with --config NAME.py."""
