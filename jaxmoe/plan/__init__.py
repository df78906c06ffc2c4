# SPDX-License-Identifier: Apache-2.0
"""A run's own step, compiled for a machine that is not here: does it fit, and how fast can it be?

Next: jaxmoe/plan/__main__.py.
"""
