# SPDX-License-Identifier: Apache-2.0
"""An engine over a pool of servers; what one kind of server is like is one file, a `Backend`."""
