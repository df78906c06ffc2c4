# SPDX-License-Identifier: Apache-2.0
"""Compile a run's step for another machine: does it fit, and what bounds its speed?

Next: jaxmoe/plan/__main__.py.
"""
