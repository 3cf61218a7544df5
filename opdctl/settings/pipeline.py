"""The whole file but `stages`."""

from typing import Any

from opdctl.fields import AxisValue, Name, Seed, Settings
from opdctl.settings.gate import GateSettings
from opdctl.settings.model import ModelSettings
from opdctl.settings.task import EffortSettings, TaskSettings
from opdctl.settings.upkeep import Disk, Notify, Retention, Retry
from opdctl.settings.watch import WatchSettings
from opdctl.workers import Machine, Workers


class Tracking(Settings):
    enabled: bool = True
    uri: str | None = None  # an MLflow server; absent: SQLite in the workspace
    experiment: str | None = None  # the pipeline's name where absent


class PipelineSettings(Settings):
    """The whole file but `stages`, which are validated one instance at a time after the fan-out."""

    name: Name
    seed: Seed = 0
    seeds: list[Seed] = []  # the whole pipeline once for each, in the place of `seed`
    axes: dict[Name, list[AxisValue]] = {}
    model: ModelSettings
    tasks: dict[Name, TaskSettings] = {}
    efforts: EffortSettings | None = None
    machine: Machine = Machine()
    workers: Workers = Workers()
    tracking: Tracking = Tracking()
    gate: GateSettings = GateSettings()
    watch: WatchSettings = WatchSettings()
    retry: Retry = Retry()
    retention: Retention = Retention()
    notify: Notify = Notify()
    disk: Disk = Disk()
    scale: dict[str, Any] = {}  # numbers that stages refer to as ${scale...}
