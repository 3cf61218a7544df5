"""`opdctl` with `guards.player` in the place of the engine."""

from guards import player

from opdctl.backends import BACKENDS
from opdctl.cli import main

if __name__ == "__main__":
    BACKENDS["embedded"] = player
    main()
