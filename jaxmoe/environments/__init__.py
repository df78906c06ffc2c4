# SPDX-License-Identifier: Apache-2.0
"""What the policy acts in: environments, tools, and the episodes between them and the engine."""
