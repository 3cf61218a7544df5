"""The gate's questions to models, data and graders: asked in the worker, before the stage trains.

Nothing that is asked here changes what the stage does: random numbers are named, not drawn from a state, and no file of
the stage is touched.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from opdctl.backends.contract import Control, InputSpec, StageSpec
from opdctl.engine.gate_large import ask_in_child, is_small, not_asked, on_the_cpu
from opdctl.engine.gate_pairs import judge_pair, judge_routes
from opdctl.engine.gate_tasks import check_demonstrations, check_difficulty, check_graders
from opdctl.engine.loop import open_vocabulary, role
from opdctl.engine.probe import read_pairs
from opdctl.engine.teachers import check_vocabularies
from opdctl.errors import OpdctlError, StageRefused
from opdctl.lineage import began_as
from opdctl.records import read_record
from opdctl.settings import GateSettings, OpdSettings
from opdctl.store import Workspace
from opdctl.verdicts import Outcome, Verdict, unasked


def check_models(spec: StageSpec, settings: GateSettings, control: Control) -> list[Verdict]:
    """Verdicts of what only models, data and graders can answer. Raises Stopped where a stop is asked for meanwhile."""
    found: list[Verdict] = []
    match spec.kind:
        case "sft":
            found += check_demonstrations(spec, settings)
        case "opd" if not spec.config["loss"].get("outcome_weight"):
            pass  # the verifier is only reported
        case "opd" | "rlvr" | "eval" | "sample":
            found += check_graders(spec, settings)
    if spec.kind in ("opd", "rlvr"):
        found += ask_models(spec, settings, control) if spec.backend == "embedded" else _beside(spec, settings, control)
    return found


def ask_models(spec: StageSpec, settings: GateSettings, control: Control) -> list[Verdict]:
    """In this process, on the stage's device."""
    ask = _check_pairs if spec.kind == "opd" else check_difficulty
    with torch.random.fork_rng(devices=[0] if spec.devices else []), torch.no_grad():
        found = list(ask(spec, settings, control))
    if spec.devices:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def _beside(spec: StageSpec, settings: GateSettings, control: Control) -> list[Verdict]:
    """Of a stage that another program carries out."""
    try:
        if is_small(spec):
            return ask_models(on_the_cpu(spec), settings, control)
        if spec.devices:
            return ask_in_child(spec, settings, control)
        return not_asked(spec, settings, "the models are too large for a CPU, and the stage has no GPU of its own")
    except OpdctlError as error:  # an architecture that verl reads and the engine does not
        return not_asked(spec, settings, str(error))


def _check_pairs(spec: StageSpec, settings: GateSettings, control: Control) -> Iterator[Verdict]:
    own, [student], teachers = OpdSettings.model_validate(spec.config), role(spec, "student"), role(spec, "teachers")
    foreign = _foreign(spec, student, teachers)
    for number, refused in foreign.items():
        subject = f"{student.label} -> {teachers[number].label}"
        yield unasked("distance", subject, str(refused), Outcome.WARN, refused.hint)
    readable = [number for number in range(len(teachers)) if number not in foreign]
    readings = list(read_pairs(spec, settings, control, readable)) if readable else []
    for number in set(readable) - {reading.number for reading in readings}:
        reason = "none of the prompts looked at is routed to it"
        yield unasked("distance", f"{student.label} -> {teachers[number].label}", reason)
    for reading in readings:
        yield from judge_pair(reading, settings, own)
    yield from judge_routes([one for one in readings if may_begin_at(spec, student, one.teacher)])


def may_begin_at(spec: StageSpec, student: InputSpec, teacher: InputSpec) -> bool:
    """Was the teacher trained from the student as it stands? True where it has no record that could say otherwise. A
    student that was trained since, on their answers or by themselves, is near to those it has learned from already."""
    if not teacher.path or isinstance(read_record(Path(teacher.path)), str):
        return True
    place = Workspace(Path(spec.workspace)), spec.seed
    itself = next(iter(began_as(student.path, student.source, *place)), "")
    return itself in began_as(teacher.path, teacher.source, *place)


def _foreign(spec: StageSpec, student: InputSpec, teachers: Sequence[InputSpec]) -> dict[int, StageRefused]:
    """Teachers of another vocabulary, which the check of files refuses: their numbers would mean nothing."""
    tokenizer, _, width = open_vocabulary(spec, student)
    found = {}
    try:
        check_vocabularies(tokenizer, width, teachers)
    except StageRefused:
        for number, teacher in enumerate(teachers):
            try:
                check_vocabularies(tokenizer, width, [teacher])
            except StageRefused as refused:
                found[number] = refused
    return found
