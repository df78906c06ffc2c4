# SPDX-License-Identifier: Apache-2.0
"""The helpers beside these tests are imported by their names: attention_oracle, attention_sides."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
