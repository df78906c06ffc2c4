# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside a sandbox. Its modules are sent as text and import the standard library.

Next: worker.py is the first to run.
"""
