# SPDX-License-Identifier: Apache-2.0
"""The user's reward functions: how they are named, called, limited and checked."""
