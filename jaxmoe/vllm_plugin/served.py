# SPDX-License-Identifier: Apache-2.0
"""How requests name the adapter that a vLLM serves. No imports: the trainer reads it too."""

ADAPTER, NUMBER = "jaxmoe_adapter", 1
