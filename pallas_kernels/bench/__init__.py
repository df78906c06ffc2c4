# SPDX-License-Identifier: Apache-2.0
"""Two implementations of one operation, checked and then timed in turn. Next: `__main__.py`."""
