"""The watchdog's rules: when a running stage is said to go wrong. Nothing here enters a stage's identity."""

from typing import Literal

from opdctl.fields import Settings

Action = Literal["off", "warn", "pause", "stop"]  # pause and stop save the state; stop fails the stage


class WatchSettings(Settings):
    """One key a rule."""

    enabled: bool = True
