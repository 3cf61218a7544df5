"""What happens around a stage's training: retries, kept checkpoints, notifications. Nothing here enters an identity."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from opdctl.fields import OFF, Count, NonNegative, Settings
from opdctl.secrets import reveal

_TOLD = {0: "no failure", 1: "an error that was told", 2: "a configuration error", 75: "a stop that was asked for"}


class Retry(Settings):
    """Of a stage whose worker died of something that may pass; never of one that was refused or told what is wrong."""

    attempts: Annotated[int, Field(ge=0, le=100)] = 2  # further ones, of one `opdctl run`
    wait_s: Annotated[float, Field(ge=0, le=86400)] = 5.0  # before the first of them
    factor: Annotated[float, Field(ge=1, le=100)] = 3.0  # each waits this many times longer, but no more than a day
    # of a worker, that count as transient beside death by a signal; 3: any error that opdctl does not foresee
    exit_codes: list[int] = []

    @model_validator(mode="after")
    def _failures(self) -> "Retry":
        if told := [code for code in self.exit_codes if code in _TOLD]:
            raise ValueError(f"exit_codes: {told[0]} is {_TOLD[told[0]]}: to try it again would not help")
        return self


class KeepBest(Settings):
    metric: str
    best: Literal["highest", "lowest"] = "highest"
    count: Count = 1


class Retention(Settings):
    """Which of a stage's checkpoints `opdctl gc` leaves. Never touched: the one in force, teachers and parents of what
    is kept, pinned ones, those in use, in any run of the workspace."""

    keep_last: Annotated[int, Field(ge=0)] = 1  # of the replaced ones, the newest
    keep_every: Annotated[int, Field(ge=0)] = 0  # every n-th publish; 0: none
    keep_best: KeepBest | None = None


NotifyOn = Literal["failed", "stopped", "finished", "refused"]


class Notify(Settings):
    """Who is told. The command gets one JSON document on its standard input, the webhook as the body of a POST."""

    command: list[str] = []
    webhook: str | None = None  # http(s); a header with a secret comes from the environment: `webhook_token_env`
    webhook_token_env: str | None = None  # name of the variable whose value is sent as a bearer token
    events: list[NotifyOn] = ["failed", "stopped", "finished", "refused"]
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0

    @model_validator(mode="after")
    def _reachable(self) -> "Notify":
        if self.webhook is not None and not reveal(self.webhook).startswith(("http://", "https://")):
            raise ValueError(f"webhook: '{self.webhook}' is no http or https address")
        return self


class Disk(Settings):
    """Free space of the workspace's file system."""

    reserve_gib: NonNegative = 0.1  # with less left, running stages save and pause, and none starts
    forecast: Annotated[Literal["refuse", "warn", "off"], OFF] = "refuse"  # where what is planned does not fit
