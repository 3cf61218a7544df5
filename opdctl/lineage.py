"""Where a checkpoint came from: the records of its ancestors, back to the models that nothing here made.

A record names its parents by the ids of their records, so a checkpoint that was replaced since is still found as it
was when it was read. A model that was read as a folder (`path:`) is known by the digests of its files: if a checkpoint
of the workspace has the same, that one is the parent, wherever the folder was.
"""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opdctl.digests import model_of
from opdctl.ledger import Deleted
from opdctl.records import SELECTION, Parent, Record, parse_record, read_json, read_record
from opdctl.store import StageDir, Workspace

HANDED_ON = ("init", "student", "base", "models", "model")  # roles whose weights a stage begins with, or publishes
IMPORT = "import"  # kind of a checkpoint that was adopted from outside


@dataclass(frozen=True)
class Edge:
    role: str
    parent: str  # key of a node
    label: str


@dataclass(frozen=True)
class Node:
    """A checkpoint; or a model from outside (new, a folder, a repository), without kind and parents."""

    key: str  # record id, or the reference of a model from outside
    title: str  # stage address, or the reference
    run: str = ""
    kind: str = ""
    step: int = 0
    seconds: float = 0.0
    created: str = ""
    path: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""  # what is odd about it; what a selection chose
    accepted: Sequence[str] = ()  # checks of the gate that refused, and were overruled by name
    parents: Sequence[Edge] = ()

    @property
    def gone(self) -> bool:
        """Made by a stage whose record cannot be read any more."""
        return not self.kind and self.note != ""


# ------------------------------------------------------------------------------------------------- who read what


class Models:
    """Checkpoints by the digests of their files, to find those that were read as folders."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._known: dict[str, list[str]] = {}
        for record in records:
            if files := model_of(record.files):
                self._known.setdefault(_digest(files), []).append(record.id)

    def ancestors(self, record: Record) -> Iterator[tuple[Parent, list[str]]]:
        """Each parent, and the ids of the records that may be it; none for a model from outside."""
        for parent, identity in zip(record.parents, _identities(record), strict=True):
            if parent.record_id:
                yield parent, [parent.record_id]
            else:
                found = self._known.get(_digest(identity), []) if isinstance(identity, Mapping) else []
                yield parent, [record_id for record_id in found if record_id != record.id]


def _digest(files: Mapping[str, Any]) -> str:
    return json.dumps(files, sort_keys=True)


def _identities(record: Record) -> list[Any]:
    """What the identity says of each parent: of a folder its files and their sha256; None where it says nothing."""
    inputs, seen = record.identity.get("inputs"), dict[str, int]()
    found: list[Any] = []
    for parent in record.parents:
        listed = inputs.get(parent.role) if isinstance(inputs, Mapping) else None
        at = seen[parent.role] = seen.get(parent.role, -1) + 1
        entry = listed[at] if isinstance(listed, list) and at < len(listed) else None
        found.append(entry.get("model") if isinstance(entry, Mapping) else None)
    return found


def records(workspace: Workspace) -> Iterator[Record]:
    """Of every checkpoint of the workspace that can be read, whatever has become of its files."""
    for stage in workspace.stages():
        for one in stage.published():
            if isinstance(found := parse_record(one.checkpoint), Record):
                yield found


# ------------------------------------------------------------------------------------------------------ the graph


def trace(workspace: Workspace, roots: Sequence[StageDir]) -> dict[str, Node]:
    """The graph above some finished stages, keyed by record id: each root, then its ancestors."""
    tracer = _Tracer(workspace)
    waiting: list[tuple[StageDir | None, Record]] = [(root, record) for root in roots if (record := root.record())]
    while waiting:
        stage, record = waiting.pop(0)
        if record.id in tracer.nodes:
            continue
        waiting += tracer.add(stage, record)
    return tracer.nodes


class _Tracer:
    def __init__(self, workspace: Workspace) -> None:
        self.nodes: dict[str, Node] = {}
        self._workspace = workspace
        self._models: Models | None = None

    def add(self, stage: StageDir | None, record: Record) -> list[tuple[StageDir | None, Record]]:
        """Note a checkpoint, without a stage one that gc deleted; returns its parents that have records."""
        if self._models is None and any(_a_folder(parent) for parent in record.parents):
            self._models = Models(records(self._workspace))
        found = (self._models or Models([])).ancestors(record)
        keyed = [(parent, self._which(parent, ids)) for parent, ids in found]
        edges = [Edge(parent.role, key, parent.label) for parent, key in keyed]
        self.nodes[record.id] = _node(stage, record, edges, self._workspace.ledger.find_deleted(record.id))
        further: list[tuple[StageDir | None, Record]] = []
        for parent, key in keyed:
            if key in self.nodes:
                continue
            source = self._workspace.checkpoint(key) if key != parent.ref else None
            if source is not None and (read := source.record()) is not None and read.id == key:
                further.append((source, read))
            elif source is None and key != parent.ref and (gone := self._workspace.ledger.find_deleted(key)):
                further.append((None, gone.record))
            else:
                self.nodes[key] = _outside(parent)
        return further

    def _which(self, parent: Parent, ids: Sequence[str]) -> str:
        """The parent's key: of several checkpoints with the same files, the one whose folder was named."""
        if not ids:
            return parent.ref
        named = os.path.basename(os.path.realpath(self._workspace.path / parent.ref.removeprefix("path:")))
        return named if named in ids else ids[0]


def _a_folder(parent: Parent) -> bool:
    return parent.record_id is None and parent.ref.startswith("path:")


def _node(stage: StageDir | None, record: Record, edges: Sequence[Edge], gone: Deleted | None) -> Node:
    deleted = [f"deleted by gc on {gone.when[:10]}"] if stage is None and gone else []
    return Node(
        key=record.id,
        title=record.stage,
        run=record.run,
        kind=record.kind,
        step=record.step,
        seconds=record.seconds,
        created=record.created,
        path=str(stage.checkpoint) if stage else "",
        metrics=record.metrics,
        note=", ".join([*_notes(stage, record), *deleted]),
        accepted=record.accepted,
        parents=edges,
    )


def _outside(parent: Parent) -> Node:
    if parent.record_id is None:
        return Node(parent.ref, "new model" if parent.ref == "model:" else parent.ref)
    return Node(
        parent.record_id, parent.ref.removeprefix("stage:"), note=f"record {parent.record_id} is gone or damaged"
    )


def _notes(stage: StageDir | None, record: Record) -> Iterator[str]:
    if record.accepted:
        yield f"accepted: {', '.join(record.accepted)}"
    if record.kind == IMPORT:
        yield from (f"{name} {value}" for name, value in record.labels.items())
    if stage is None:
        return
    if selection := read_json(stage.checkpoint / SELECTION, "winner"):
        yield f"is {selection['winner']}"
    if _replaced(stage, record):
        yield "replaced since"


def _replaced(stage: StageDir, record: Record) -> bool:
    """Has the stage that made it another checkpoint in force by now?"""
    current = StageDir(stage.path, stage.name).record()
    return current is not None and current.id != record.id and stage.pinned != ""


def commit_of_code() -> str:
    """Of opdctl itself, `-dirty` behind it where files are changed; empty for an installed copy."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()


# ------------------------------------------------------------------------------------------------------ the weights


def began_as(path: str, source: str, workspace: Workspace, seed: int) -> dict[str, str]:
    """Key -> title of the model in this folder and of those whose weights it began with, itself and the youngest first.

    A new model (no folder) is known by its stage's seed, one from outside by its reference `source`; of a folder that
    has neither a record nor a reference nothing is known.
    """
    if not path:
        return {f"model:{seed}": "the new model"}
    own = read_record(Path(path))
    if isinstance(own, str):
        return {source: source} if source else {}
    found: dict[str, str] = {}
    waiting: list[Record] = [own]
    while waiting:
        record = waiting.pop(0)
        found[record.id] = f"{record.stage} of run {record.run}"
        for parent in record.parents:
            if parent.role not in HANDED_ON:
                continue
            if parent.record_id is None:
                new = parent.ref == "model:"
                key = f"model:{record.identity.get('seed')}" if new else parent.ref
                found.setdefault(key, "the new model" if new else parent.ref)
            elif parent.record_id not in found and (stage := workspace.checkpoint(parent.record_id)) is not None:
                known = stage.record()
                waiting += [known] if known is not None else []
    return found
