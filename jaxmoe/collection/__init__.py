# SPDX-License-Identifier: Apache-2.0
"""A step's data: tasks, rollouts, their scores, and the batch; evaluation on held-out rows."""
