"""Which checkpoints of a workspace stay, and why.

Whatever `retention` says, these do: what is in force in any run, what any run refers to, what is pinned, and every
ancestor of what stays, by record id and, for models read as folders, by digest. Nor is a run at work touched.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opdctl.lineage import Models
from opdctl.records import RECORD, Record, parse_record, read_json
from opdctl.settings import KeepBest, Retention
from opdctl.store import RunDir, StageDir, Workspace
from opdctl.validation import validate

UNREADABLE = "its record cannot be read: opdctl verify"


@dataclass
class Checkpoint:
    """A folder in some stage's checkpoints/."""

    stage: StageDir
    record: Record | None
    problem: str  # why the record cannot be read
    half_deleted: bool  # by a gc that was killed
    stays: list[str] = field(default_factory=list)  # why

    @property
    def id(self) -> str:
        return self.stage.pinned

    @property
    def path(self) -> Path:
        return self.stage.checkpoint

    @property
    def order(self) -> tuple[str, str]:
        return (self.record.created if self.record else "", self.id)

    @property
    def needed(self) -> bool:
        """Does it stay for another reason than that nobody knows what it is?"""
        return bool(set(self.stays) - {UNREADABLE})


class Census:
    """All checkpoints of a workspace, each with the reasons why it stays; of runs that are not `wanted`, all do."""

    def __init__(self, workspace: Workspace, wanted: Collection[str]) -> None:
        self.stages = list(workspace.stages())
        self.runs = {run.name: run for run in workspace.runs()}
        self.busy = {name for name, run in self.runs.items() if run.at_work()}
        self._workspace, self._wanted = workspace, wanted
        self._deleted = workspace.ledger.deleted()
        self._by_path: dict[Path, Checkpoint] = {}
        self._by_id: dict[str, list[Checkpoint]] = {}
        for stage in self.stages:
            for one in stage.published():
                self._add(one)
        known = [item.record for item in self.checkpoints if item.record]
        gone = [note.record for name, note in self._deleted.items() if name not in self._by_id]
        self._models = Models([*known, *gone])
        self._mark_referred()
        self._mark_named()
        for item in self.checkpoints:
            self._mark_untouched(item)
        for stage in self.stages:
            self._mark_retained(stage)
        self._mark_ancestors()

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return list(self._by_path.values())

    def inside(self, path: Path) -> bool:
        """Is it in the workspace's own runs/, and not behind a link?"""
        return _real(path).is_relative_to(_real(self._workspace.path / "runs"))

    def _add(self, one: StageDir) -> None:
        read = parse_record(one.checkpoint)
        record, problem = (read, "") if isinstance(read, Record) else (None, read)
        half = record is None and not (one.checkpoint / RECORD).exists() and one.pinned in self._deleted
        item = Checkpoint(one, record, problem, half)
        self._by_path.setdefault(_real(one.checkpoint), item)
        self._by_id.setdefault(one.pinned, []).append(item)

    # ------------------------------------------------------------------------------------------------- the rules

    def _keep(self, record_id: str, why: str) -> None:
        for item in self._by_id.get(record_id, []):
            item.stays.append(why)

    def _keep_path(self, path: Path, why: str) -> None:
        """The checkpoint that this path leads to or into."""
        real = _real(path)
        for place in (real, *real.parents):
            if place in self._by_path:
                self._by_path[place].stays.append(why)

    def _mark_referred(self) -> None:
        """By the link of a stage, its half-trained state, or its worker."""
        for stage in self.stages:
            where = f"{stage.run}:{stage.name}"
            if stage.linked:
                own = stage.checkpoint.parent.parent == stage.path
                self._keep_path(stage.checkpoint, "in force" if own else f"reused by {where}")
            for record_id in stage.unfinished_parents():
                self._keep(str(record_id), f"half-trained state of {where} started from it")
            if stage.run in self.busy:
                spec = read_json(stage.spec, "inputs") or {"inputs": []}
                for given in spec["inputs"]:
                    self._keep(str(given.get("source")), f"read by {where}, which is at work")
                    if given.get("path"):
                        self._keep_path(Path(given["path"]), f"read by {where}, which is at work")

    def _mark_named(self) -> None:
        """By a pin, or by a path in a pipeline."""
        for record_id, pin in self._workspace.ledger.pins().items():
            self._keep(record_id, f"pinned{f': {pin.reason}' if pin.reason else ''}")
        for run in self.runs.values():
            for text in set(_strings(run.read_pipeline())):
                path = os.path.join(self._workspace.path, text.removeprefix("path:"))
                if len(path) < 4096 and "\0" not in path and ("/" in text or os.path.islink(path)):
                    self._keep_path(Path(path), f"named by path in pipeline.yaml of {run.name}")

    def _mark_untouched(self, item: Checkpoint) -> None:
        run = item.stage.run
        if run in self.busy:
            item.stays.append(f"run {run} is at work")
        elif not self.inside(item.path):
            item.stays.append("it lies outside of the workspace, behind a link")
        elif run not in self._wanted:
            item.stays.append(f"run {run} was not asked for")
        elif item.problem and not item.half_deleted:
            item.stays.append(UNREADABLE)

    def _mark_retained(self, stage: StageDir) -> None:
        """By the stage's `retention`."""
        published = [item for item in self.checkpoints if item.stage.path == stage.path and item.record is not None]
        if not published or stage.run not in self.runs:
            return
        settings = retention_of(self.runs[stage.run], stage.name)
        if settings is None:
            for item in published:
                item.stays.append(f"pipeline.yaml of {stage.run} cannot be read: its retention is not known")
            return
        published.sort(key=lambda item: item.order)
        in_force = _real(stage.checkpoint)
        replaced = [item for item in published if _real(item.path) != in_force]
        for item in replaced[max(0, len(replaced) - settings.keep_last) :]:
            item.stays.append(f"keep_last: {settings.keep_last}")
        if settings.keep_every:
            for record_id in self._history(stage, published)[settings.keep_every - 1 :: settings.keep_every]:
                self._keep(record_id, f"keep_every: {settings.keep_every}")
        if settings.keep_best is not None:
            _mark_best(published, settings.keep_best)

    def _history(self, stage: StageDir, published: Sequence[Checkpoint]) -> list[str]:
        """Every publish of the stage, oldest first: those that gc deleted count too, so that numbers stay."""
        order = {
            name: (note.record.created, name)
            for name, note in self._deleted.items()
            if (note.record.run, note.record.stage) == (stage.run, stage.name)
        }
        order |= {item.id: item.order for item in published}
        return sorted(order, key=order.__getitem__)

    def _mark_ancestors(self) -> None:
        waiting = [item.record for item in self.checkpoints if item.stays and item.record]
        seen = {record.id for record in waiting}
        while waiting:
            record = waiting.pop()
            for parent, ids in self._models.ancestors(record):
                for record_id in ids:
                    self._keep(record_id, f"{parent.role} of {record.run}:{record.stage}, which stays")
                    if record_id not in seen:
                        seen.add(record_id)
                        waiting += self._records(record_id)

    def _records(self, record_id: str) -> list[Record]:
        """Of the checkpoints of this id; where there is none, of the one that gc deleted."""
        if items := [item.record for item in self._by_id.get(record_id, []) if item.record]:
            return items
        return [self._deleted[record_id].record] if record_id in self._deleted else []


def retention_of(run: RunDir, stage: str) -> Retention | None:
    """What the run's own pipeline says of the stage's checkpoints; None where it cannot be read."""
    pipeline = run.read_pipeline()
    if not pipeline:
        return None
    given = pipeline["stages"].get(stage, {}).get("retention") or pipeline.get("retention") or {}
    settings, _ = validate(Retention, given)
    return settings


def _mark_best(published: Sequence[Checkpoint], best: KeepBest) -> None:
    told = {item.id: item.record.metrics.get(best.metric) for item in published if item.record}
    values = {name: value for name, value in told.items() if value is not None and math.isfinite(value)}
    known = [item for item in published if item.id in values]
    if not known:  # a mistyped name must not cost all of them
        for item in published:
            item.stays.append(f"keep_best: none has the metric {best.metric}")
    sign = 1 if best.best == "highest" else -1
    known.sort(key=lambda item: (sign * values[item.id], item.order), reverse=True)
    for item in known[: best.count]:
        item.stays.append(f"keep_best: {best.metric} {values[item.id]:g}")


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _strings(value)


def _real(path: Path) -> Path:
    """Without links; unlike `resolve` it takes one that leads back to itself."""
    return Path(os.path.realpath(path))
