# SPDX-License-Identifier: Apache-2.0
"""Reward functions that come with jaxmoe, each named by module:function."""
