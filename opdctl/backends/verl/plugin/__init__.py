"""What opdctl adds to verl, in every process of a run: its losses and estimators, and on a machine without an
accelerator a CPU platform. Imported by `bootstrap/opdctl_verl.py` while `import verl` is under way.

Nothing of verl is imported here: each part waits until verl has imported what it adds to.
"""

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    from opdctl.backends.verl.plugin import cpu

    cpu.install()
