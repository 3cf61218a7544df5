"""Do the inputs of a stage, and what they publish, fit what the stage does with them?"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from opdctl.references import Input, Problem, near_miss
from opdctl.settings import (
    AnyStage,
    AnyTask,
    EvalSettings,
    EvalStage,
    FileTask,
    HarnessSettings,
    Mixture,
    OpdSettings,
    OpdStage,
    PipelineSettings,
    PolicyGradientOpd,
    RlvrSettings,
    SampleSettings,
    SampleStage,
    SelectSettings,
    SftSettings,
)
from opdctl.settings.merge import WITHOUT_BASE, MergeSettings

SCORED = ("models", "before", "teachers", "after")  # roles of an eval stage whose models are in its report
STATIC_COLUMNS = ("domain", "effort")  # of every row; known before any row is read


def mixture(settings: AnyStage) -> Mixture | None:
    """What the stage reads of the tasks; None for a merge, a selection and an evaluation with tasks of its own."""
    config = settings.config
    return None if isinstance(config, MergeSettings | SelectSettings | HarnessSettings) else config.data


def route_columns(settings: AnyStage, pipeline: PipelineSettings) -> list[str]:
    """The columns of a row that labels of this stage's models are compared with."""
    if isinstance(settings, OpdStage):
        return list(settings.config.route_by)
    if isinstance(settings, EvalStage):
        return [*STATIC_COLUMNS, *_file_columns(settings, pipeline)]
    return []


def _file_columns(settings: AnyStage, pipeline: PipelineSettings) -> list[str]:
    data = mixture(settings)
    named = [pipeline.tasks.get(name) for name in (data.tasks if data else ())]
    return list(dict.fromkeys(column for task in named for column in _further(task)))


def _further(task: AnyTask | None) -> list[str]:
    """Columns of a task's rows beside STATIC_COLUMNS."""
    return [*task.columns, *task.constants] if isinstance(task, FileTask) else []


def check_roles(settings: AnyStage, inputs: Sequence[Input]) -> Iterator[Problem]:
    """Is every role there that the settings read, and none that they do not?"""
    roles = {given.role for given in inputs} | settings.inputs.keys()  # a bad reference is told elsewhere
    config = settings.config
    required: dict[str, str] = {}
    useless: dict[str, str] = {}
    match config:
        case RlvrSettings():
            required["init"] = ""
            kl, effort = config.kl.estimator != "none", config.effort is not None
            (required if kl else useless)["reference"] = f"config.kl.estimator is {config.kl.estimator}"
            (required if effort else useless)["budget"] = f"config.effort is {'set' if effort else 'not set'}"
        case OpdSettings():
            required = {"student": "", "teachers": ""}
            if isinstance(config.loss, PolicyGradientOpd):
                scale = config.loss.teacher_scale
                (useless if scale == 1 else required)["reference"] = f"config.loss.teacher_scale is {scale:g}"
            else:
                useless["reference"] = f"config.loss.form is {config.loss.form}"
        case EvalSettings():
            if not roles & {"models", "before", "teachers", "after"}:
                yield "inputs", "names no model; give models, or before, teachers and after (for the fusion table)"
            elif "models" in roles and roles & {"before", "teachers", "after"}:
                yield "inputs", "give either models, or before, teachers and after"
            elif "models" not in roles:
                required = dict.fromkeys(("before", "teachers", "after"), "the fusion table compares all three")
            if config.within is None:
                useless["budget"] = "config.within is not set"
            elif "models" in roles:
                required["budget"] = "config.within is set, and there is no `before` to stand in"
        case HarnessSettings():
            if not roles & set(SCORED):
                yield "inputs", "names no model; give models"
            useless = dict.fromkeys(("budget", "grader"), "config.harness is lm_eval")
        case MergeSettings():
            required["models"] = ""
            why = f"config.merge.method is {config.merge.method}"
            (useless if isinstance(config.merge, WITHOUT_BASE) else required)["base"] = why
        case SampleSettings():
            required["model"] = ""
        case SelectSettings():
            required = {"report": "", "models": ""}
        case _:
            required["init"] = ""
    if isinstance(config, RlvrSettings | EvalSettings):
        grader = config.grader
        why = f"config.grader.by is {grader.by}" if grader else "config.grader is not set"
        (required if grader and grader.by == "model" else useless)["grader"] = why
    for role, why in required.items():
        if role not in roles:
            yield f"inputs.{role}", "required, and not set" + (f": {why}" if why else "")
    for role, why in useless.items():
        if role in roles:
            yield f"inputs.{role}", f"would not be read: {why}"


def check_labels(inputs: Sequence[Input]) -> Iterator[Problem]:
    """Models compared in one table, or routed to, need names of their own."""
    listed = [given for given in inputs if given.role in SCORED]
    seen: dict[str, str] = {}
    for given in listed:
        if given.label in seen:
            roles = " and ".join(dict.fromkeys((seen[given.label], given.role)))
            yield f"inputs.{given.role}", f"two models of {roles} are called '{given.label}'; give one another label"
        seen.setdefault(given.label, given.role)


def check_sources(
    settings: AnyStage,
    inputs: Sequence[Input],
    stages: Mapping[str, AnyStage],
    read: Mapping[str, Sequence[Input]],
) -> Iterator[Problem]:
    """Do the stages that it reads publish what the role wants: a model, data or a report? `stages`: those that are
    valid; `read`: what each stage reads."""
    sampled: list[Mixture] = []
    for given in inputs:
        source = stages.get(given.target) if given.kind == "stage" else None
        if given.role == "data" and given.kind != "stage":
            yield "inputs.data", f"'{given.ref}' is no stage: rows of files are tasks, to be named in config.data.tasks"
        elif given.role == "data" and isinstance(source, SampleStage):
            sampled.append(source.config.data)
        elif given.role == "data" and source is not None:
            yield "inputs.data", f"'{given.target}' is of kind {source.kind}; kind sample publishes data"
        elif given.role == "report":
            if isinstance(settings.config, SelectSettings):
                yield from _selection(settings.config, inputs, given, source, read.get(given.target, ()))
        elif source is not None and source.kind in ("eval", "sample"):
            yield f"inputs.{given.role}", f"'{given.target}' is of kind {source.kind}, which publishes no model"
    if sampled and isinstance(settings.config, SftSettings):
        yield from _sampled(settings.config.data, sampled)


def _selection(
    config: SelectSettings, inputs: Sequence[Input], report: Input, source: AnyStage | None, scored: Sequence[Input]
) -> Iterator[Problem]:
    """Will the report hold the metric, the cells and the candidates?"""
    if report.kind != "stage":
        yield "inputs.report", f"'{report.ref}' is no stage: the report of an eval stage is read"
    if not isinstance(source, EvalStage):
        if source is not None:
            yield "inputs.report", f"'{report.target}' is of kind {source.kind}; kind eval publishes a report"
        return
    yield from _cells(config, source.config, report.target)
    known = {given.ref for given in scored if given.role in SCORED}
    for given in inputs:
        if given.role != "models":
            continue
        if given.ref not in known:
            refs = [other.ref for other in scored if other.role in SCORED]
            told = near_miss(given.ref, refs, "scored")
            yield "inputs.models", f"'{report.target}' does not score '{given.ref}'" + told
        if given.kind == "model":
            yield "inputs.models", "'model:' is made anew wherever it is read, so there is nothing to publish"


def _cells(config: SelectSettings, exam: EvalSettings | HarnessSettings, report: str) -> Iterator[Problem]:
    """Has the report the metric and the cells? Those of a harness are known once it has run."""
    for cell in dict.fromkeys(cell for cell in config.cells if config.cells.count(cell) > 1):
        yield "config.cells", f"'{cell}' is there twice; name it once"
    if isinstance(exam, HarnessSettings):
        if config.metric == "within_budget":
            yield "config.metric", f"within_budget, and '{report}' counts none: its config.harness is lm_eval"
        return
    data = exam.data
    cells = [f"{task}.{effort}" if effort else task for task in data.tasks for effort in data.efforts or [""]]
    for cell in dict.fromkeys(config.cells):
        if cell not in cells:
            yield "config.cells", f"'{report}' has no cell '{cell}'" + near_miss(cell, cells, "cells")
    if config.metric == "within_budget" and exam.within is None:
        yield "config.metric", f"within_budget, and '{report}' counts none: its config.within is not set"


def _sampled(wanted: Mixture, given: Sequence[Mixture]) -> Iterator[Problem]:
    """Every task, at every effort, has to be sampled by some stage."""
    there = {(task, effort) for data in given for task in data.tasks for effort in data.efforts or [""]}
    for task in dict.fromkeys(wanted.tasks):
        efforts = [effort for own, effort in there if own == task]
        if not efforts:
            yield "inputs.data", f"no stage samples task '{task}' of config.data.tasks"
        elif bare := [effort for effort in dict.fromkeys(wanted.efforts) if effort not in efforts]:
            yield "inputs.data", f"no stage samples task '{task}' at effort {', '.join(bare)} of config.data.efforts"


def check_route_columns(settings: OpdStage, pipeline: PipelineSettings) -> Iterator[Problem]:
    """Does every row have the columns that choose its teacher?"""
    for column in dict.fromkeys(settings.config.route_by):
        if settings.config.route_by.count(column) > 1:
            yield "config.route_by", f"'{column}' is there twice; name it once"
        known = [*STATIC_COLUMNS, *_file_columns(settings, pipeline)]
        if column not in known:
            told = f"rows have no column '{column}'" + near_miss(column, known, "columns")
            yield "config.route_by", f"{told}; tasks.NAME.columns takes one from a file, tasks.NAME.constants sets one"
        for name in settings.config.data.tasks if column not in STATIC_COLUMNS else ():
            task = pipeline.tasks.get(name)
            if column in known and column not in _further(task):
                yield "config.route_by", f"tasks.{name}.columns does not have '{column}'"


def check_coverage(
    config: OpdSettings | EvalSettings, route_by: Sequence[str], teachers: Sequence[Input], default: bool
) -> Iterator[Problem]:
    """Exactly one teacher for each combination of columns that the data can hold."""
    routes: dict[tuple[str, ...], str] = {}
    for given in teachers:
        if lacking := [column for column in route_by if column not in given.route]:
            yield "inputs.teachers", f"'{given.label}' has no label '{lacking[0]}' to be routed by; give it a route"
            continue
        key = tuple(given.route[column] for column in route_by)
        if key in routes:
            yield "inputs.teachers", f"'{routes[key]}' and '{given.label}' are both for {_row(route_by, key)}"
        routes.setdefault(key, given.label)
    static = [at for at, column in enumerate(route_by) if column in STATIC_COLUMNS]
    values = {"domain": list(dict.fromkeys(config.data.tasks)), "effort": list(dict.fromkeys(config.data.efforts))}
    wanted = list(itertools.product(*(values[route_by[at]] for at in static)))
    covered = {tuple(key[at] for at in static) for key in routes}
    columns = [route_by[at] for at in static]
    bare = [_row(columns, key) for key in wanted if key not in covered]
    if bare and not default and static:
        hint = "add teachers, or set config.default_teacher" if isinstance(config, OpdSettings) else "add teachers"
        yield "inputs.teachers", f"no teacher for {'; '.join(bare)} ({hint})"
    for key, label in routes.items():
        if tuple(key[at] for at in static) not in wanted:
            yield "inputs.teachers", f"'{label}' is for {_row(route_by, key)}, which the data cannot hold"


def _row(columns: Sequence[str], key: Sequence[str]) -> str:
    return ", ".join(f"{column}={value}" for column, value in zip(columns, key, strict=True)) or "every row"
