# SPDX-License-Identifier: Apache-2.0
"""Environments and tools that were written for other projects, in our protocol."""
