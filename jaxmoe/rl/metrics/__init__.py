# SPDX-License-Identifier: Apache-2.0
"""Metrics of an RL step: of its updates, of the router, and of experts in four bits."""
