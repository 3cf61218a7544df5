"""The watchdog: rules over a stage's events that tell training from its imitation. Pure; the runner acts."""

from opdctl.watchdog.watch import Alarm, Watch

__all__ = ["Alarm", "Watch"]
