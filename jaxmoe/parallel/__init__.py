# SPDX-License-Identifier: Apache-2.0
"""Meshes and shardings."""
