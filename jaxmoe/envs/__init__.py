# SPDX-License-Identifier: Apache-2.0
"""What the policy acts in and how it is scored."""
