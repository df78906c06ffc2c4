# SPDX-License-Identifier: Apache-2.0
"""What the tests of the product share can be imported here, and their pool of sandboxes."""

import sys
from pathlib import Path

from tests.jaxmoe.graders.conftest import pool

__all__ = ["pool"]

sys.path.insert(0, str(Path(__file__).parents[2] / "jaxmoe"))
