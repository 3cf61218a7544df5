"""Files and folders that a pipeline names and that are not there, or not whole."""

from collections.abc import Iterator
from pathlib import Path

from opdctl.adopt import RUN as IMPORTS
from opdctl.errors import ConfigError, OpdctlError
from opdctl.fetch import DATA, DATA_FOLDER, MODELS, MODELS_FOLDER
from opdctl.model_folder import model_files
from opdctl.pipeline import Pipeline
from opdctl.settings import FileTask, PublicTask, ToolTaskSettings
from opdctl.store import Workspace
from opdctl.tasks.shards import data_files


def missing_files(pipeline: Pipeline) -> Iterator[str]:
    """A line each, by key."""
    tasks = {name: task for stage in pipeline.stages.values() for name, task in stage.settings.tasks.items()}
    for name, task in tasks.items():
        for key in ("path", "eval_path") if isinstance(task, FileTask) else ():
            given = getattr(task, key)
            if given is None:
                continue
            try:
                if "*" not in given and not (pipeline.folder / given).exists():
                    raise ConfigError(f"tasks.{name}.{key}: no such file: {given}")
                data_files(pipeline.folder / given, f"tasks.{name}.{key}")
            except ConfigError as error:
                yield _told(error)
        for file in task.files().values() if isinstance(task, PublicTask) else ():
            if not (pipeline.folder / file).is_file():
                known = [data for data in DATA if file.startswith(f"{DATA_FOLDER}/{data}/")]
                hint = f" (opdctl data fetch {known[0]} makes it)" if known else ""
                yield f"tasks.{name}: no such file: {file}{hint}"
        for key, given in task.files().items() if isinstance(task, ToolTaskSettings) else ():
            if not (pipeline.folder / given).exists():
                yield f"tasks.{name}.{key}: no such file: {given}"
    for stage in pipeline.stages.values():
        folder = getattr(stage.settings.config, "include_path", None)
        if folder is not None and not (pipeline.folder / folder).is_dir():
            yield f"stages.{stage.name}.config.include_path: no such folder: {folder}"
    yield from _models(pipeline)


def _models(pipeline: Pipeline) -> Iterator[str]:
    keys: dict[tuple[str, str], str] = {}
    computed: set[str] = set()  # read by the embedded engine
    for stage in pipeline.stages.values():
        for item in stage.inputs:
            if item.kind in ("path", "gguf"):
                keys.setdefault((item.kind, item.target), f"stages.{stage.name}.inputs.{item.role}")
                computed |= {item.target} if stage.settings.backend == "embedded" else set()
    for (kind, given), key in keys.items():
        if kind == "gguf":
            if not (pipeline.folder / given).is_file():
                yield f"{key}: no such file: {given}"
        elif not (pipeline.folder / given).is_dir():
            yield f"{key}: no such folder: {given}{_where(pipeline.folder, given)}"
        else:
            try:
                model_files(pipeline.folder / given, computed=given in computed)
            except OpdctlError as error:
                yield f"{key}: {_told(error)}"


def _where(workspace: Path, given: str) -> str:
    name = Path(given).name
    adopted = Workspace(workspace).run(IMPORTS).stage(name).path / "checkpoint"
    if adopted.is_dir():
        return f" (imported as {name}: path:{adopted.relative_to(workspace)})"
    makes = name in MODELS and Path(given).parent.name == MODELS_FOLDER
    return f" (opdctl model fetch {name} makes it)" if makes else ""


def _told(error: OpdctlError) -> str:
    return f"{error} ({error.hint})" if error.hint else str(error)
