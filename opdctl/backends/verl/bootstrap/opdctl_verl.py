"""Loads opdctl's plug-in into a process of verl, which finds this module by PYTHONPATH and VERL_USE_EXTERNAL_MODULES.

verl has a Python environment of its own, where opdctl is not installed. Only the package `opdctl` becomes importable
there, from where it stands: with its whole site-packages folder on the path, opdctl's libraries would hide verl's.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
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


# first: an opdctl installed in verl's environment need not be the one that started this process
sys.meta_path.insert(0, _Opdctl())
import_module("opdctl.backends.verl.plugin")
