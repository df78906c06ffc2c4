# SPDX-License-Identifier: Apache-2.0
"""What the tests here share can be imported: peer, published, random_weights."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
