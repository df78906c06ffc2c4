# SPDX-License-Identifier: Apache-2.0
"""Harmony, the chat format of GPT-OSS: parsed from token ids, and written with them."""
