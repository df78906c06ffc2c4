# SPDX-License-Identifier: Apache-2.0
"""What the tests here share can be imported: weight_updates."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
