"""The command line of opdctl with the toy trainer in the place of the embedded engine."""

import toy_backend

from opdctl.backends import BACKENDS
from opdctl.cli import main

if __name__ == "__main__":
    BACKENDS["embedded"] = toy_backend
    main()
