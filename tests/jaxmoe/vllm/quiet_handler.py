# SPDX-License-Identifier: Apache-2.0
"""The base of HTTP handlers in tests: connections stay open, and nothing is logged."""

from http.server import BaseHTTPRequestHandler


class QuietHandler(BaseHTTPRequestHandler):
    """A handler of HTTP/1.1 without a log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or head and body of an answer are 40 ms apart

    def log_message(self, *args):
        pass
