# SPDX-License-Identifier: Apache-2.0
"""One run: its parts, memory, kernels and compiled programs, its job, checks and dry run."""
