# SPDX-License-Identifier: Apache-2.0
"""Kernels checked on the chip that is here, each in a process of its own that may die or hang.

    python -m pallas_kernels.check

choice.py turns verdicts into what each operation runs; verdicts.py keeps them; child.py starts the
process, one.py is what runs in it, compare.py how close is close.
"""
