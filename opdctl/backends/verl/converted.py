"""Rows that were converted for verl, kept in the workspace by a digest of all that they depend on.

    runs/.data/CONTENT/train.parquet, validation.parquet
    runs/.data/CONTENT/data.json          last: {content, rows, sha256 of each file}

A learning rate does not change rows: a stage run again with another one finds them made. A stage's state has links to
them, and its checkpoint a copy of data.json, whose digests are in the record. The folder may be deleted: what is
missing is converted again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.backends.verl.layout import Layout
from opdctl.digests import installed
from opdctl.records import read_json, sha256, write_json
from opdctl.settings import TASKS, AnyTask, FileTask, NewModel
from opdctl.tasks.files import data_digest
from opdctl.weight_files import weight_files

NOTE = "data.json"
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "config.json",
)  # fmt: skip
_BLIND = ("optimizer", "save_every", "precision", "lora")  # keys of config.train that no row depends on
_PACKAGE = Path(__file__).parents[2]
_CODE = (
    "tasks/**/*.py", "settings/**/*.py", "engine/rows.py", "engine/chat.py", "engine/tokenizer.py", "engine/effort.py",
    "engine/teachers.py", "backends/verl/data.py", "backends/verl/judge.py", "backends/verl/budgets.py",
)  # fmt: skip


def convert_once(spec: StageSpec, files: Layout, make: Callable[[Path, Path], None]) -> dict[str, Any]:
    """Links `files.train` and `files.validation` to rows that `make` wrote to two paths, now or earlier; the note."""
    content = _content(spec)
    folder = Path(spec.workspace) / "runs" / ".data" / content
    made = train, validation = folder / files.train.name, folder / files.validation.name
    known = read_json(folder / NOTE, "sha256", "rows")
    if known is None or any(not path.is_file() or sha256(path) != known["sha256"][path.name] for path in made):
        make(train, validation)
        digests = {path.name: sha256(path) for path in made}
        known = {"content": content, "rows": _rows(train), "sha256": digests}
        write_json(folder / NOTE, known)
    for link, target in ((files.train, train), (files.validation, validation)):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target.absolute())
    write_json(files.train.with_name(NOTE), known)
    return known


def publish(files: Layout, output: Path) -> None:
    """The note of the rows that a stage was trained on, beside its weights."""
    if (note := read_json(files.train.with_name(NOTE))) is not None:
        write_json(output / NOTE, note)


def _rows(path: Path) -> int:
    from pyarrow import parquet

    return int(parquet.read_metadata(path).num_rows)


def _content(spec: StageSpec) -> str:
    """Digest of the code, the settings and the files that the rows depend on."""
    train = {key: value for key, value in spec.config["train"].items() if key not in _BLIND}
    workspace = Path(spec.workspace)
    settings = {name: TASKS[given["task"]].model_validate(given) for name, given in spec.tasks.items()}
    parts = [
        _digest(sorted(path for pattern in _CODE for path in _PACKAGE.glob(pattern))),
        spec.kind,
        spec.seed,
        {**spec.config, "train": train},
        {name: _without_paths(task) for name, task in settings.items()},
        {name: _data(task, workspace) for name, task in settings.items()},
        spec.efforts,
        [_input(spec, given) for given in spec.inputs],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _without_paths(task: AnyTask) -> dict[str, Any]:
    plain: dict[str, Any] = task.model_dump(mode="json")
    return {key: value for key, value in plain.items() if key not in ("path", "eval_path")}


def _data(task: AnyTask, workspace: Path) -> list[Any]:
    if isinstance(task, FileTask):
        return list(data_digest(task, workspace).values())
    files: Mapping[str, str] = task.files() if hasattr(task, "files") else {}
    packages = {name: installed(name) for name in getattr(task, "PACKAGES", ())}
    return [_digest(_tree(workspace / file)) for file in files.values()] + [packages]


def _tree(path: Path) -> Iterator[Path]:
    yield from sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]


def _input(spec: StageSpec, given: InputSpec) -> list[Any]:
    """Of most models the tokenizer and the route; what a sampler wrote, and what budgets are drawn by, whole."""
    whole = given.role in ("data", "budget") or bool(spec.config.get("effort"))
    name = (given.source or given.path) if whole else ""
    if not given.path:
        made = spec.new_model if whole else NewModel.model_validate(spec.new_model).tokenizer.words
        return [given.role, given.label, dict(given.route), made]
    there = [Path(given.path) / file for file in _TOKENIZER]
    if given.role == "budget":  # a folder of the user's has its name whatever is in it
        there += weight_files(Path(given.path))
    tokenizer = "" if given.role == "data" else _digest(path for path in there if path.is_file())
    return [given.role, given.label, dict(given.route), name, tokenizer]


def _digest(paths: Any) -> str:
    """Of names and contents."""
    found = [f"{path.name} {sha256(path)}" for path in paths]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
