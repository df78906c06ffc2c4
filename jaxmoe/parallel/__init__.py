# SPDX-License-Identifier: Apache-2.0
"""Meshes, shardings, the ops on a mesh, and the processes of a run."""
