# SPDX-License-Identifier: Apache-2.0
"""The output of a run: metrics, progress, alerts, plots and samples."""
