"""Where a checkpoint came from: the records of its ancestors, back to the models that nothing here made.

A record names its parents by the ids of their records, so a checkpoint that was replaced since is still found as it
was when it was read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opdctl.records import SELECTION, Parent, Record, read_json
from opdctl.store import StageDir, Workspace


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
    parents: Sequence[Edge] = ()

    @property
    def gone(self) -> bool:
        """Made by a stage whose record cannot be read any more."""
        return not self.kind and self.note != ""


def trace(workspace: Workspace, roots: Sequence[StageDir]) -> dict[str, Node]:
    """The graph above some finished stages, keyed by record id: each root, then its ancestors."""
    nodes: dict[str, Node] = {}
    waiting: list[StageDir] = list(roots)
    while waiting:
        stage = waiting.pop(0)
        record = stage.record()
        if record is None or record.id in nodes:
            continue
        nodes[record.id] = _node(stage, record)
        for parent in record.parents:
            key = _key(parent)
            if key in nodes:
                continue
            source = workspace.checkpoint(key) if parent.record_id else None
            if source is not None and source.record() is not None:
                waiting.append(source)
            else:
                nodes[key] = _outside(parent)
    return nodes


def _key(parent: Parent) -> str:
    return parent.record_id or parent.ref


def _node(stage: StageDir, record: Record) -> Node:
    return Node(
        key=record.id,
        title=record.stage,
        run=record.run,
        kind=record.kind,
        step=record.step,
        seconds=record.seconds,
        created=record.created,
        path=str(stage.checkpoint),
        metrics=record.metrics,
        note=", ".join(_notes(stage, record)),
        parents=[Edge(parent.role, _key(parent), parent.label) for parent in record.parents],
    )


def _outside(parent: Parent) -> Node:
    if parent.record_id is None:
        return Node(parent.ref, "new model" if parent.ref == "model:" else parent.ref)
    return Node(
        parent.record_id, parent.ref.removeprefix("stage:"), note=f"record {parent.record_id} is gone or damaged"
    )


def _notes(stage: StageDir, record: Record) -> Iterator[str]:
    if selection := read_json(stage.checkpoint / SELECTION, "winner"):
        yield f"is {selection['winner']}"
    if _replaced(stage, record):
        yield "replaced since"


def _replaced(stage: StageDir, record: Record) -> bool:
    """Has the stage that made it another checkpoint in force by now?"""
    current = StageDir(stage.path, stage.name).record()
    return current is not None and current.id != record.id and stage.pinned != ""
