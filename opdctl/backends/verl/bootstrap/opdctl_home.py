"""Makes the package `opdctl` importable in an interpreter where it is not installed.

Only that one, from where it stands: with its whole site-packages folder on the path, opdctl's libraries would hide
those of the interpreter's own environment.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[3]


class _Opdctl(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "opdctl":
            return None
        return spec_from_file_location("opdctl", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)])


# first: an opdctl installed in that environment need not be the one that started this process
sys.meta_path.insert(0, _Opdctl())
