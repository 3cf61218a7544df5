"""Which rows somebody means by the arguments of `data`, and whose tokens count."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opdctl.data.check import Limit
    from opdctl.data.rendering import Model
    from opdctl.data.source import Source
    from opdctl.errors import ConfigError
    from opdctl.pipeline import Pipeline
    from opdctl.settings import AnyTask, FileTask

DIRECT = "rows"  # name of the task that rows given directly make


@dataclass(frozen=True)
class Chosen:
    """Rows that somebody means."""

    name: str
    settings: "AnyTask"
    folder: Path
    pipeline: "Pipeline | None" = None

    def open(self, *, limit: int) -> "Source":
        from opdctl.data.source import open_source

        efforts = self.pipeline.settings.efforts if self.pipeline else None
        seed = self.pipeline.settings.seed if self.pipeline else 0
        return open_source(self.name, self.settings, efforts, self.folder, seed=seed, limit=limit)

    def model(self, ref: str | None) -> "Model | None":
        """Whose tokens count. Raises ConfigError for a reference that leads nowhere."""
        from opdctl.errors import ConfigError
        from opdctl.references import parse_reference
        from opdctl.settings import NewModel

        own = self.pipeline.settings.model if self.pipeline else None
        if ref is None and own is None:
            return None
        plain = ref is not None and ":" not in ref and (self.folder / ref).is_dir()
        kind, target = parse_reference(f"path:{ref}" if plain else ref or "model:", own)
        from opdctl.data.rendering import Model

        if kind == "stage":
            raise ConfigError(f"--model {ref}: name a folder", hint="path:runs/RUN/stages/STAGE/checkpoint")
        if kind == "model":
            assert isinstance(own, NewModel)
            return Model(None, own)
        return Model(_model_folder(kind, target, self.folder))

    def limits(self) -> "list[Limit]":
        """Of the stages that read the task; once where instances of a fan-out have the same."""
        from opdctl.data.check import Limit
        from opdctl.settings import SftSettings

        found: dict[Limit, None] = {}
        for stage in self.pipeline.stages.values() if self.pipeline else ():
            config: Any = stage.settings.config
            data = getattr(config, "data", None)
            if data is None or self.name not in data.tasks:
                continue
            if isinstance(config, SftSettings):
                found[Limit(stage.base, "config.max_tokens", "both", config.max_tokens, refuses=True)] = None
                continue
            key, rollout = "config.rollout", getattr(config, "rollout", None)
            if rollout is None:  # a harness asks its own way
                continue
            found[Limit(stage.base, f"{key}.max_prompt_tokens", "prompt", rollout.max_prompt_tokens, refuses=True)] = (
                None
            )
            longest = rollout.max_completion_tokens
            found[Limit(stage.base, f"{key}.max_completion_tokens", "completion", longest, refuses=False)] = None
        return list(found)


def _model_folder(kind: str, target: str, folder: Path) -> Path:
    from opdctl.console import make_console
    from opdctl.fetch import hub_folder, imported_gguf
    from opdctl.store import Workspace

    def report(text: str) -> None:
        make_console(stderr=True).print(text, soft_wrap=True)

    if kind == "path":
        return folder / target
    if kind == "gguf":
        return imported_gguf(folder / target, Workspace(folder).digests().file(folder / target), folder, report)
    report(f"fetching hf:{target}")
    return hub_folder(target)


def file_keys(
    prompt: str | None,
    answer: str | None,
    completion: str | None,
    answer_pattern: str | None,
    verifier: str | None,
    template: str | None,
    column: list[str] | None,
    eval_path: str | None,
) -> dict[str, Any]:
    """The keys of a task of kind `file` that options gave."""
    given = {
        "prompt": prompt,
        "answer": answer,
        "completion": completion,
        "answer_pattern": answer_pattern,
        "verifier": verifier,
        "template": template,
        "columns": column or None,
        "eval_path": eval_path,
    }
    return {key: value for key, value in given.items() if value is not None}


def choose(
    source: str,
    overrides: Sequence[str] | None,
    task: str | None,
    mapping: Path | None,
    keys: dict[str, Any],
    workspace: Path,
) -> Chosen:
    from opdctl.errors import ConfigError

    here = workspace / source
    if task is None and not source.endswith(".yaml") and (here.exists() or "*" in source):
        if overrides:
            raise ConfigError(f"overrides belong to a pipeline, and {source} holds rows: {' '.join(overrides)}")
        return Chosen(DIRECT, file_task(source, mapping, keys, workspace), workspace)
    if not source.endswith(".yaml") and ("/" in source or "." in source):
        raise ConfigError(
            f"no such file or folder: {source}", hint=f"paths start at {Path(os.path.abspath(workspace))}"
        )
    if keys or mapping:
        told = ", ".join(["mapping"] if mapping else [f"--{key.replace('_', '-')}" for key in keys])
        raise ConfigError(f"{told}: for rows given directly; a pipeline's task is changed by an override")
    from opdctl.config import load_pipeline
    from opdctl.references import near_miss

    loaded = load_pipeline(source, overrides or (), workspace=workspace)
    known = loaded.settings.tasks
    if task is None and len(known) == 1:
        task = next(iter(known))
    if task is None or task not in known:
        near = near_miss(task, known, "tasks") if task else ""
        raise ConfigError(
            f"{source}: no task '{task}'{near}" if task else f"{source}: which task?",
            hint=f"--task NAME, one of {', '.join(known)}",
        )
    return Chosen(task, known[task], loaded.folder, loaded)


def file_task(source: str, mapping: Path | None, keys: dict[str, Any], workspace: Path) -> "FileTask":
    """The task that options and a mapping file declare. Raises ConfigError with every problem."""
    import yaml  # type: ignore[import-untyped]  # its stubs for one name

    from opdctl.errors import ConfigError
    from opdctl.settings import FileTask
    from opdctl.validation import validate

    given: Any = {}
    if mapping is not None:
        try:
            given = yaml.safe_load((workspace / mapping).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"--mapping {mapping}: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(f"--mapping {mapping}: must be keys of a task, such as `prompt: question`")
    merged = {"verifier": "exact", **given, **keys, "path": source}
    if "prompt" not in merged:
        raise _which_columns(workspace / source, source)
    settings, defects = validate(FileTask, merged)
    if settings is None:
        raise ConfigError([f"{key or source}: {text}" for key, text in defects])
    return settings


def _which_columns(path: Path, source: str) -> "ConfigError":
    from opdctl.data.source import raw_columns
    from opdctl.errors import ConfigError

    columns = {name: _kind(value) for name, value in raw_columns(path).items()}
    has = ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "none that can be read"
    return ConfigError(
        f"{source}: which column is the prompt? It has: {has}",
        hint="--prompt COLUMN --answer COLUMN; of a conversation --prompt COLUMN --completion COLUMN --template chat",
    )


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {_kind(value[0])}" if value else "list"
    if isinstance(value, dict):
        return "{" + ", ".join(map(str, value)) + "}"
    return "text" if isinstance(value, str) else type(value).__name__
