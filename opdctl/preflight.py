"""What files must hold before a stage starts: rows that can be read, graders that accept right answers, enough prompts.

Whatever a worker would stumble over hours later is found here, for all stages at once. Generated tasks need no look.
"""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from opdctl.errors import ConfigError, OpdctlError
from opdctl.pipeline import Pipeline, Stage
from opdctl.settings import EvalSettings, FileTask, OpdSettings, SampleSettings
from opdctl.tasks import load_task

if TYPE_CHECKING:
    from opdctl.tasks.files import FileRows

GRADED = 8  # reference answers that a verifier is tried on


def check_data(pipeline: Pipeline, stages: Iterable[Stage]) -> list[str]:
    """What is wrong with the tasks of these stages, a line each, by its key. Reads every file of theirs."""
    wanted = list(stages)
    named = {name: t for stage in wanted for name, t in stage.settings.tasks.items() if isinstance(t, FileTask)}
    problems: list[str] = []
    tasks: dict[str, FileRows] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what a verifier of the user's own prints
        for name, settings in named.items():
            try:
                tasks[name] = _open(pipeline, name, settings)
                problems += _grader(name, settings, tasks[name])
            except OpdctlError as error:
                problems += _told(error)
    for stage in wanted:
        problems += [f"stages.{stage.name}.{text}" for text in (*_prompts(stage, tasks), *_routes(stage, tasks))]
    return problems


def _open(pipeline: Pipeline, name: str, settings: FileTask) -> "FileRows":
    from opdctl.tasks.files import FileRows

    task = load_task(name, settings, pipeline.settings.efforts, pipeline.folder)
    assert isinstance(task, FileRows)
    return task


def _told(error: OpdctlError) -> list[str]:
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    return [*lines[:-1], f"{lines[-1]} ({error.hint})" if error.hint else lines[-1]]


def _grader(name: str, settings: FileTask, task: "FileRows") -> Iterator[str]:
    """A verifier that rejects right answers rewards nothing."""
    from opdctl.tasks.verifiers import check_references

    if threading.current_thread() is not threading.main_thread():
        return  # verifiers with a time limit work in the main thread only, as workers' do
    rejected = check_references(task, min(GRADED, task.size("train") or 0))
    if rejected:
        yield f"tasks.{name}.verifier: {settings.verifier} rejects {len(rejected)} reference answers: {rejected[0]}"


def _prompts(stage: Stage, tasks: "Mapping[str, FileRows]") -> Iterator[str]:
    config = stage.settings.config
    if not isinstance(config, EvalSettings | SampleSettings):
        return
    sampled = isinstance(config, SampleSettings)
    for name in dict.fromkeys(config.data.tasks):
        size = tasks[name].size("train" if sampled else "eval") if name in tasks else None
        if size is None or size >= config.rollout.prompts:
            continue
        if sampled:
            yield f"config.rollout.prompts: {config.rollout.prompts}, but task '{name}' has {size} rows for training"
        else:
            yield (
                f"config.rollout.prompts: {config.rollout.prompts}, but task '{name}' has {size} rows for evaluation "
                f"(raise tasks.{name}.held_out, or give an eval_path)"
            )


def _routes(stage: Stage, tasks: "Mapping[str, FileRows]") -> Iterator[str]:
    """A teacher for every combination of columns that the rows hold."""
    config = stage.settings.config
    if not isinstance(config, OpdSettings) or config.default_teacher is not None:
        return
    teachers = [given for given in stage.inputs if given.role == "teachers"]
    routes = {tuple(given.route.get(column) for column in config.route_by) for given in teachers}
    asked: dict[tuple[str, ...], None] = {}
    for name in dict.fromkeys(config.data.tasks):
        rows = tasks[name].columns("train") if name in tasks else []
        for columns in rows:
            for effort in config.data.efforts or [""]:
                every = {**columns, "domain": name, "effort": effort}
                asked[tuple(every.get(column, "") for column in config.route_by)] = None
    if bare := [key for key in asked if key not in routes]:
        shown = "; ".join(", ".join(f"{c}={v}" for c, v in zip(config.route_by, key, strict=True)) for key in bare[:5])
        more = f" and {len(bare) - 5} more" if len(bare) > 5 else ""
        yield f"inputs.teachers: no teacher for {shown}{more} (add teachers, or set config.default_teacher)"
