# SPDX-License-Identifier: Apache-2.0
"""Makes the helpers of this folder importable by name: attention_oracle, attention_sides."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
