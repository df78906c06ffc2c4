# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels on this machine's accelerator, each in a child process.

    python -m pallas_kernels.check

choice.py selects each operation's implementation by the verdicts, verdicts.py stores them, child.py
starts the process, one.py runs in it, compare.py has the error limits.
"""
