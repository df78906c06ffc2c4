# SPDX-License-Identifier: Apache-2.0
"""Several processes and their hosts: what they agree on, messages between them, host memory."""
