"""Loads opdctl's plug-in into a process of verl, which finds this module by PYTHONPATH and VERL_USE_EXTERNAL_MODULES.

verl has a Python environment of its own, where opdctl is not installed.
"""

from importlib import import_module

import_module("opdctl_home")
import_module("opdctl.backends.verl.plugin")
