"""Files and folders that a pipeline names and that are not there."""

from collections.abc import Iterator
from pathlib import Path

from opdctl.adopt import RUN as IMPORTS
from opdctl.errors import ConfigError
from opdctl.fetch import DATA, DATA_FOLDER, MODELS, MODELS_FOLDER
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
                yield f"{error} ({error.hint})" if error.hint else str(error)
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
    models: dict[tuple[str, str], str] = {}
    for stage in pipeline.stages.values():
        for item in stage.inputs:
            if item.kind in ("path", "gguf"):
                models.setdefault((item.kind, item.target), f"stages.{stage.name}.inputs.{item.role}")
    for (kind, folder), key in models.items():
        if kind == "gguf":
            if not (pipeline.folder / folder).is_file():
                yield f"{key}: no such file: {folder}"
        elif not (pipeline.folder / folder).is_dir():
            name = Path(folder).name
            makes = name in MODELS and Path(folder).parent.name == MODELS_FOLDER
            adopted = Workspace(pipeline.folder).run(IMPORTS).stage(name).path / "checkpoint"
            hint = f" (opdctl model fetch {name} makes it)" if makes else ""
            if adopted.is_dir():
                hint = f" (imported as {name}: path:{adopted.relative_to(pipeline.folder)})"
            yield f"{key}: no such folder: {folder}{hint}"
        elif not (pipeline.folder / folder / "config.json").is_file():
            yield f"{key}: {folder} is no model in Hugging Face format: it has no config.json"
