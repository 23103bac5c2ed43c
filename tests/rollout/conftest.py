"""The tests of this folder import `rollout_helpers.py`, which lies beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
