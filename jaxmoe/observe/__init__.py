# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself: metrics, progress, plots."""
