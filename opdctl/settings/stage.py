"""What stages of every kind have: a backend, inputs, labels, resources."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from opdctl.fields import AxisValue, Name, Positive, Seed, Settings
from opdctl.settings.eval import EvalSettings, SelectSettings
from opdctl.settings.gate import GateSettings
from opdctl.settings.harness import HarnessSettings
from opdctl.settings.merge import MergeSettings
from opdctl.settings.opd import OpdSettings
from opdctl.settings.rlvr import RlvrSettings
from opdctl.settings.sample import SampleSettings
from opdctl.settings.sft import SftSettings
from opdctl.settings.task import EffortSettings, TaskSettings
from opdctl.settings.upkeep import Retention, Retry
from opdctl.settings.watch import WatchSettings
from opdctl.workers import Resources


class WeightedInput(Settings):
    """A teacher, or an evaluated or merged model, with more than a reference."""

    ref: str
    route: dict[str, str] = {}  # values of the `route_by` columns; from the stage's labels where absent
    weight: Positive = 1.0
    label: str = ""


class Foreach(Settings):
    """`foreach: {AXIS: values, ...}` is short for `product`. With both: every zipped row for each of the product."""

    product: dict[Name, list[AxisValue]] = {}
    zip: dict[Name, list[AxisValue]] = {}


class RoundInput(Settings):
    """On a stage with the axis `round`: `first` in its first round, then `then` with the axis at the round before."""

    first: str
    then: str


class Gate(Settings):
    """A bound on one of a stage's final metrics, looked at once it has finished, and whenever it is reused."""

    metric: Annotated[str, Field(min_length=1)]
    min: float | None = None
    max: float | None = None
    action: Literal["stop", "skip", "warn"]  # start nothing more; skip the stages that read this one; say it

    @model_validator(mode="after")
    def _bounded(self) -> "Gate":
        if self.min is None and self.max is None:
            raise ValueError("needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: nothing passes; exchange them")
        return self


def _input_tag(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    if isinstance(value, RoundInput) or (isinstance(value, dict) and value.keys() & {"first", "then"}):
        return "rounds"
    return "model" if isinstance(value, dict | WeightedInput) else "reference"


_One = Annotated[str, Tag("reference")] | Annotated[WeightedInput, Tag("model")] | Annotated[RoundInput, Tag("rounds")]
_Several = Annotated[list[Annotated[_One, Discriminator(_input_tag)]], Tag("list")]
InputValue = Annotated[_One | _Several, Discriminator(_input_tag)]


class _Stage(Settings):
    backend: Literal["embedded", "verl", "vllm"]
    inputs: dict[str, InputValue]  # role -> reference or references
    labels: dict[Name, str] = {}  # with the fan-out's values: routing, tags and tables
    gates: list[Gate] = []
    resources: Resources = Resources()
    verl: dict[str, Any] = {}  # backend verl: raw overrides, verl's own key -> value; keys that opdctl sets are refused
    gate: GateSettings | None = None  # this and the next three: the pipeline's where absent
    watch: WatchSettings | None = None
    retry: Retry | None = None
    retention: Retention | None = None
    seed: Seed | None = None  # the pipeline's seed where absent
    tasks: dict[str, TaskSettings] = {}  # filled in from the pipeline: the definitions that `data.tasks` names
    efforts: EffortSettings | None = None  # filled in from the pipeline


class SftStage(_Stage):
    kind: Literal["sft"]
    config: SftSettings


class RlvrStage(_Stage):
    kind: Literal["rlvr"]
    config: RlvrSettings


class OpdStage(_Stage):
    kind: Literal["opd"]
    config: OpdSettings


def _harness_tag(value: Any) -> Any:
    return value.get("harness", "opdctl") if isinstance(value, dict) else value.harness


class EvalStage(_Stage):
    kind: Literal["eval"]
    config: Annotated[
        Annotated[EvalSettings, Tag("opdctl")] | Annotated[HarnessSettings, Tag("lm_eval")],
        Discriminator(_harness_tag),
    ]


class MergeStage(_Stage):
    kind: Literal["merge"]
    config: MergeSettings


class SampleStage(_Stage):
    kind: Literal["sample"]
    config: SampleSettings


class SelectStage(_Stage):
    kind: Literal["select"]
    config: SelectSettings


AnyStage = SftStage | RlvrStage | OpdStage | EvalStage | MergeStage | SampleStage | SelectStage
StageSettings = Annotated[AnyStage, Field(discriminator="kind")]
