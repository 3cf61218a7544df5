"""Published data where they are: the folder of OPDCTL_DATA, else ../shared/data beside the checkout."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def published(*names: str) -> Path:
    """The folder that holds these; skips the test where it does not."""
    folder = Path(os.environ.get("OPDCTL_DATA", ROOT.parent / "shared/data"))
    for name in names:
        if not (folder / name).exists():
            pytest.skip(f"no {folder / name}: published data are not in the repository; OPDCTL_DATA names their folder")
    return folder
