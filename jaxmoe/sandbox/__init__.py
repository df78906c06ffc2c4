# SPDX-License-Identifier: Apache-2.0
"""Processes that run programs of the policy, and what keeps them in. Start with probe.py."""
