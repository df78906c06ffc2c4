# SPDX-License-Identifier: Apache-2.0
"""Requests to one vLLM server, and checks of what it answers. Next: http_backend.py."""
