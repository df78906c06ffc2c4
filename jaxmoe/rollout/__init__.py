# SPDX-License-Identifier: Apache-2.0
"""Engines that sample: prompts in, tokens and their log-probs out."""
