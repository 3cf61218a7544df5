"""What the stage tells its plug-in: the JSON file that `opdctl.backends.verl.data` writes before verl starts."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from opdctl.backends.verl.layout import SETTINGS_VARIABLE
from opdctl.errors import OpdctlError
from opdctl.records import write_json


@cache
def told() -> dict[str, Any]:
    """The stage's settings; read once a process. Raises KeyError where the environment names no file."""
    return dict(json.loads(Path(os.environ[SETTINGS_VARIABLE]).read_text()))


def fail(error: OpdctlError) -> NoReturn:
    """End the stage: opdctl finds the reason in a file, for verl would go on after some of the errors raised in it."""
    write_json(Path(told()["failure"]), {"message": str(error), "hint": error.hint})
    raise error
