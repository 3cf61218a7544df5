"""All that crosses the process boundary: `spec.json` in, `events.jsonl` while running, `result.json` at the end.

Concrete values only: directories and numbers, never `stage:sft`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

EXIT_STOPPED = 75  # EX_TEMPFAIL: the stage stopped because it was asked to; its state is saved


@dataclass(frozen=True)
class InputSpec:
    """A model that a stage reads."""

    role: str  # init, reference, budget, student, teachers, before, after, models, base, model, data, report, grader
    label: str  # how tables and messages call it: the producing stage's address, or the reference
    path: str  # a folder in Hugging Face format (role data: of a sample stage); empty: a new model, `new_model`
    route: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    source: str = ""  # record id of a stage's checkpoint, once it is there; reference of a model from outside


@dataclass(frozen=True)
class StageSpec:
    stage: str  # address: "sft", "max[domain=general]"
    kind: str
    backend: str
    seed: int
    config: Mapping[str, Any]  # the settings class of the kind (`opdctl.settings`), as plain data
    tasks: Mapping[str, Mapping[str, Any]]  # name -> settings; `path`s are absolute
    efforts: Mapping[str, Any] | None
    resources: Mapping[str, Any]
    workers: Mapping[str, Any]  # settings.VerlWorkers or VllmWorkers of the backend, `python` absolute; embedded: empty
    verl: Mapping[str, Any]  # the user's raw overrides
    devices: Sequence[int]  # leased GPU ids; empty: CPU
    inputs: Sequence[InputSpec]
    workspace: str  # the worker's current folder
    new_model: Mapping[str, Any] | None  # settings.NewModel, for an input with an empty path
    state: str  # folder of the recovery state; the backend's own, kept across attempts
    output: str  # empty folder to fill with what the stage publishes
    events: str  # file to append to
    result: str  # file to write last
    # settings.GateSettings as `settings`, the `file` for verdicts and their `key`, unless it was passed before; checks
    # whose refusals are `accepted`; tasks that were `trained` on before an evaluation. Empty: the gate is off
    gate: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One line of `events.jsonl`. A step seen again after a resume has the same values and is dropped by readers."""

    step: int
    total: int
    metrics: Mapping[str, float]
    phase: str = "train"  # what is going on, for the progress display
    time: float = 0.0  # seconds since the epoch


@dataclass(frozen=True)
class StageResult:
    step: int  # optimizer steps done in all; models scored (eval), merged or compared (select), prompts asked (sample)
    metrics: Mapping[str, float]  # final ones, and the cost: cpu_seconds, sampled_tokens, sampled_completions


class Control(Protocol):
    """What a running stage may ask of and tell its surroundings."""

    def stop_requested(self) -> bool: ...

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None: ...


class Stopped(Exception):
    """Raised by a backend once its state is saved after `stop_requested`."""


class Backend(Protocol):
    """A module with these members; see `opdctl.backends.BACKENDS`."""

    REVISION: str  # part of every identity: raise it when the same settings give other numbers

    def check(self, specs: Sequence[StageSpec]) -> Mapping[str, list[str]]:
        """What stops these stages from running here: stage -> a line each. Nothing heavy is imported into this process;
        folders of stages that are still to run do not exist yet."""
        ...

    def command(self, spec: StageSpec) -> str:
        """What a shell would be given to run the stage by hand; empty where there is no such command."""
        ...

    def run(self, spec: StageSpec, control: Control) -> StageResult:
        """Carry the stage out, resuming from `spec.state` when it holds anything; fill `spec.output`."""
        ...


Run = Callable[[StageSpec, Control], StageResult]
