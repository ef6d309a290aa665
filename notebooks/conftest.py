"""Repairs nbval for `pytest --nbval notebooks/`; tests/nbval_repairs.py says what and why."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from nbval_repairs import repair

repair()
