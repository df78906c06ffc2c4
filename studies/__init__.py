# SPDX-License-Identifier: Apache-2.0
"""The studies behind docs/results: `python -m studies` lists them. Next: studies/__main__.py."""
