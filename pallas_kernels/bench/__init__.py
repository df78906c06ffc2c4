# SPDX-License-Identifier: Apache-2.0
"""How operations are called, timed and counted. Next: `ops.py`."""
