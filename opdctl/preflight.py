"""What files must hold before a stage starts: rows that can be read, graders that accept right answers, enough prompts.

Whatever a worker would stumble over hours later is found here, for all stages at once. Generated tasks need no look.
"""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opdctl.errors import ConfigError, OpdctlError
from opdctl.jail import require_isolation
from opdctl.pipeline import Pipeline, Stage
from opdctl.settings import (
    EvalSettings,
    FileTask,
    OpdSettings,
    PublicTask,
    PythonTask,
    RepositoryTask,
    RlvrSettings,
    SampleSettings,
    SftSettings,
    ToolTaskSettings,
)
from opdctl.tasks import Task, load_task

GRADED = 8  # reference answers that a verifier is tried on


def check_data(pipeline: Pipeline, stages: Iterable[Stage]) -> list[str]:
    """What is wrong with the tasks of these stages, a line each, by its key. Reads every file of theirs."""
    wanted = list(stages)
    settings = {name: task for stage in wanted for name, task in stage.settings.tasks.items()}
    named = {
        name: task for name, task in settings.items() if isinstance(task, FileTask | PublicTask | ToolTaskSettings)
    }
    problems: list[str] = []
    tasks: dict[str, Task] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what a verifier of the user's own prints
        for name, task in named.items():
            try:
                if isinstance(task, PythonTask | RepositoryTask):
                    require_isolation()
                tasks[name] = load_task(name, task, pipeline.settings.efforts, pipeline.folder)
                problems += _grader(name, task, tasks[name])
            except OpdctlError as error:
                problems += _told(error)
    for stage in wanted:
        problems += [f"stages.{stage.name}.{text}" for text in (*_prompts(stage, tasks), *_routes(stage, tasks))]
    return problems


def _told(error: OpdctlError) -> list[str]:
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    return [*lines[:-1], f"{lines[-1]} ({error.hint})" if error.hint else lines[-1]]


def _grader(name: str, settings: FileTask | PublicTask | ToolTaskSettings, task: Task) -> Iterator[str]:
    """A verifier that rejects right answers rewards nothing."""
    from opdctl.tasks.verifiers import check_references

    if threading.current_thread() is not threading.main_thread():
        return  # verifiers with a time limit work in the main thread only, as workers' do
    rejected = check_references(task, min(GRADED, task.size("train") or 0))
    if rejected:
        by = f".verifier: {settings.verifier}" if isinstance(settings, FileTask) else ": its verifier"
        yield f"tasks.{name}{by} rejects {len(rejected)} reference answers: {rejected[0]}"


def _prompts(stage: Stage, tasks: Mapping[str, Task]) -> Iterator[str]:
    config = stage.settings.config
    if isinstance(config, SftSettings | RlvrSettings | OpdSettings):
        yield from _training(config.data.tasks, tasks, isinstance(config, SftSettings))
    if not isinstance(config, EvalSettings | SampleSettings):
        return
    sampled = isinstance(config, SampleSettings)
    for name in dict.fromkeys(config.data.tasks):
        size = tasks[name].size("train" if sampled else "eval") if name in tasks else None
        if size is None or size >= config.rollout.prompts or (isinstance(config, EvalSettings) and config.whole):
            continue
        if sampled:
            yield f"config.rollout.prompts: {config.rollout.prompts}, but task '{name}' has {size} rows for training"
        else:
            yield (
                f"config.rollout.prompts: {config.rollout.prompts}, but task '{name}' has {size} rows for evaluation "
                f"(lower it, or set config.whole)"
            )


def _training(names: Sequence[str], tasks: Mapping[str, Task], imitated: bool) -> Iterator[str]:
    """Some published data are a test and nothing else, and some have no solutions."""
    for name in dict.fromkeys(names):
        try:
            if name in tasks and imitated:
                tasks[name].demonstrations(0, 0, 1)
            elif name in tasks:
                tasks[name].prompts("train", 0, 0, 1, None)
        except ConfigError as error:
            yield f"config.data.tasks: {error}"


def _routes(stage: Stage, tasks: Mapping[str, Task]) -> Iterator[str]:
    """A teacher for every combination of columns that the rows hold."""
    config = stage.settings.config
    if not isinstance(config, OpdSettings) or config.default_teacher is not None:
        return
    routes = [given.route for given in stage.inputs if given.role == "teachers"]
    if bare := uncovered(config, routes, tasks):
        more = f" and {len(bare) - 5} more" if len(bare) > 5 else ""
        yield (
            f"inputs.teachers: no teacher for {'; '.join(bare[:5])}{more} (add teachers, or set config.default_teacher)"
        )


def uncovered(config: OpdSettings, routes: Sequence[Mapping[str, str]], tasks: Mapping[str, Task]) -> list[str]:
    """The combinations of `route_by` columns (`domain=math, effort=low`) that rows of these tasks have, and no route.
    Columns of files are read from their rows."""
    from opdctl.tasks.files import FileRows

    known = {tuple(route.get(column) for column in config.route_by) for route in routes}
    asked: dict[tuple[str, ...], None] = {}
    for name in dict.fromkeys(config.data.tasks):
        task = tasks.get(name)
        rows = task.columns("train") if isinstance(task, FileRows) else [] if task is None else [{}]
        for columns in rows:
            for effort in config.data.efforts or [""]:
                every = {**columns, "domain": name, "effort": effort}
                asked[tuple(every.get(column, "") for column in config.route_by)] = None
    return [
        ", ".join(f"{column}={value}" for column, value in zip(config.route_by, key, strict=True))
        for key in asked
        if key not in known
    ]
