# SPDX-License-Identifier: Apache-2.0
"""Weights and runs on disk: Hugging Face checkpoints, PEFT adapters, and resumable run folders.

Read in this order: run.py, store.py, hf.py, tensor_files.py, mxfp4.py.
"""
