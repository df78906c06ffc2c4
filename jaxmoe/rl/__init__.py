# SPDX-License-Identifier: Apache-2.0
"""The training step: batch, state, optimizer, step."""
