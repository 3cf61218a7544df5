"""Who is compared with whom: the models of a stage, two by two, and what the second is asked about the first."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.gate.folders import Files, NewFiles
from opdctl.settings import NewModel


@dataclass(frozen=True)
class Party:
    """A model that a stage reads."""

    given: InputSpec
    files: Files
    made: bool = True  # else `files` are those of the model that it will begin with

    @property
    def label(self) -> str:
        return self.given.label

    @property
    def role(self) -> str:
        return self.given.role.removesuffix("s")

    @property
    def new(self) -> bool:
        return isinstance(self.files, NewFiles)


@dataclass(frozen=True)
class Pair:
    first: Party
    second: Party
    scores: bool  # the second gives log-probabilities to the first's token ids, or is averaged with it
    teaches: bool = False  # the second is to change the first
    merged: bool = False  # their weights are averaged

    @property
    def subject(self) -> str:
        return f"{self.first.label} -> {self.second.label}"

    @cached_property
    def one(self) -> bool:
        """Are both the same folder, made or not?"""
        first, second = self.first.given.path, self.second.given.path
        return bool(first) and Path(first).resolve() == Path(second).resolve()


def parties(spec: StageSpec) -> list[Party]:
    """Models whose files are there, graders left out; `spec.gate["stand_ins"]` has the folder, or "" for a new model,
    that an input without one will begin with, by its number."""
    stand_ins = spec.gate.get("stand_ins", {})
    found = []
    for number, given in enumerate(spec.inputs):
        if given.role in ("data", "report", "grader"):
            continue
        path, made = given.path, True
        if path and not Path(path).is_dir() and str(number) in stand_ins:
            path, made = stand_ins[str(number)], False
        if Path(path).is_absolute() and Path(path).is_dir():  # the name of a repository is no folder
            found.append(Party(given, Files(Path(path)), made))
        elif not path and spec.new_model is not None:
            new = NewFiles(NewModel.model_validate(spec.new_model), Path(spec.workspace))
            found.append(Party(given, new, made))
    return found


def pairs(spec: StageSpec, models: list[Party]) -> Iterator[Pair]:
    """Of distillation: student and teachers, student and reference. Of RL: policy and reference, policy and the model
    that sets budgets, which only samples. Of an evaluation that measures divergences: `before` and the others. Of a
    merge: the model that gives the frame, and the others."""

    def of(*roles: str) -> list[Party]:
        return [party for role in roles for party in models if party.given.role == role]

    match spec.kind:
        case "opd":
            for student in of("student"):
                yield from (Pair(student, teacher, scores=True, teaches=True) for teacher in of("teachers"))
                yield from (Pair(student, reference, scores=True) for reference in of("reference"))
        case "rlvr":
            for policy in of("init"):
                yield from (Pair(policy, reference, scores=True) for reference in of("reference"))
                yield from (Pair(policy, budget, scores=False) for budget in of("budget"))
        case "eval" if spec.config.get("divergence"):
            for before in of("before"):
                yield from (Pair(before, other, scores=True) for other in of("teachers", "after"))
        case "merge":
            everyone = of("base", "models")
            yield from (Pair(everyone[0], other, scores=True, merged=True) for other in everyone[1:])
