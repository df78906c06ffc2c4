# SPDX-License-Identifier: Apache-2.0
"""The helper beside these tests is imported by its name: compositions."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
