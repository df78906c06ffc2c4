# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in PEFT's format: their settings, the layout of their tensors, read and written."""
