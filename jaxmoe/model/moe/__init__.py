# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of a layer: its router, its routing, and its experts."""
