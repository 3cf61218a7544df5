"""What the stage tells its plug-in: the JSON file that `opdctl.backends.verl.data` writes before verl starts."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from opdctl.backends.verl.layout import SETTINGS_VARIABLE


@cache
def told() -> dict[str, Any]:
    """The stage's settings; read once a process. Raises KeyError where the environment names no file."""
    return dict(json.loads(Path(os.environ[SETTINGS_VARIABLE]).read_text()))
