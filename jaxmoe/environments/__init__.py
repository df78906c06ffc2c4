# SPDX-License-Identifier: Apache-2.0
"""Environments, tools, and the episodes between them and the engine."""
