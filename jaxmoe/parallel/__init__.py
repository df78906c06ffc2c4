# SPDX-License-Identifier: Apache-2.0
"""Meshes, shardings and the ops on a mesh."""
