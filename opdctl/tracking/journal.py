"""What there is to track, on disk beside each attempt, so that it can be told to MLflow at any later time.

It is there twice: `tracking.json`, and `begun.json` as it was when the attempt started, for whatever damages the first.

A curve is one training of a stage: the attempts that carried it on, one MLflow run. An attempt with other settings,
other parents, or after the stage was published begins another curve.
"""

import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from opdctl.backends.events import EventTail
from opdctl.records import Parent, read_json
from opdctl.store import Attempt, Record, StageDir, write_json

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Published:
    """The checkpoint that a curve ended with."""

    record_id: str
    step: int
    metrics: Mapping[str, float]
    folder: str
    digests: Mapping[str, str]  # file -> sha256


@dataclass(frozen=True)
class Ending:
    status: Status
    time: float  # seconds since the epoch
    message: str = ""  # why it failed; gates that it did not pass
    published: Published | None = None


@dataclass(frozen=True)
class Entry:
    """One attempt. Without `ended` it is running."""

    stage: str
    kind: str
    labels: Mapping[str, str]
    fingerprint: str
    parents: list[Parent]
    settings: Mapping[str, Any]  # the stage's, as plain data
    data: Mapping[str, str]  # task -> digest of its definition
    attempt: int
    started: float  # seconds since the epoch
    curve: str = field(default_factory=lambda: uuid.uuid4().hex)
    ended: Ending | None = None
    pipeline_run: str = ""  # unique id of the pipeline run, also in run.json


def begin(stage: StageDir, attempt: Attempt, entry: Entry, *, resumed: bool) -> None:
    """Note that the attempt starts; it carries on the curve before it where nothing but time lies between them."""
    earlier = entries(stage)
    if earlier:
        last = earlier[-1][1]
        finished = last.ended is not None and last.ended.status == "FINISHED"
        same = (last.fingerprint, last.parents) == (entry.fingerprint, entry.parents)
        if not finished and (resumed or same):
            entry = replace(entry, curve=last.curve)
    for other in _untold(stage, attempt) if resumed else []:
        seen = other.events.stat().st_mtime
        ending = Ending("KILLED", seen, "it was noted by the attempt that went on from it")
        write_json(_file(other), asdict(replace(entry, attempt=other.number, ended=ending)))
    for path in (_begun(attempt), _file(attempt)):
        write_json(path, asdict(entry))


def _untold(stage: StageDir, attempt: Attempt) -> list[Attempt]:
    """Attempts whose state this one goes on from, and that could not be noted when they started: the disk was full."""
    published = max((_created(record) for record in stage.records()), default=-math.inf)
    found: list[Attempt] = []
    for other in reversed([one for one in stage.attempts() if one.number < attempt.number]):
        first = next((events[0] for events in EventTail(other.events).parts() if events), None)
        if _read(other) is not None or (first is not None and other.events.stat().st_mtime <= published):
            break
        found += [other] if first is not None else []
        if first is not None and first.step <= 1:
            break
    return found


def end(attempt: Attempt, ending: Ending) -> None:
    if (entry := _read(attempt)) is not None:
        write_json(_file(attempt), asdict(replace(entry, ended=ending)))


def end_dead(stage: StageDir) -> None:
    """Under the run's lock, before anything starts: attempts without an end are those of a dead orchestrator."""
    known = entries(stage)
    if all(entry.ended for _, entry in known):
        return
    records = stage.records()
    for at, (attempt, entry) in enumerate(known):
        if entry.ended is not None:
            continue
        until = known[at + 1][1].started if at + 1 < len(known) else math.inf
        own = (record for record in records if record.fingerprint == entry.fingerprint)
        made = [record for record in own if entry.started <= _created(record) < until]
        if made:
            record = max(made, key=_created)
            end(attempt, Ending("FINISHED", _created(record), "", published(stage, record)))
        else:
            seen = attempt.events if attempt.events.exists() else _begun(attempt)
            told = read_json(attempt.path / "error.json", "message")
            why = str(told["message"]) if told else "the orchestrator ended before the stage did"
            end(attempt, Ending("FAILED" if told else "KILLED", seen.stat().st_mtime, why))


def published(stage: StageDir, record: Record) -> Published:
    digests = {name: str(listed["sha256"]) for name, listed in record.files.items()}
    return Published(record.id, record.step, record.metrics, str(stage.at(record.id).checkpoint), digests)


def entries(stage: StageDir) -> list[tuple[Attempt, Entry]]:
    """Oldest first; attempts that were not tracked are left out."""
    found = ((attempt, _read(attempt)) for attempt in stage.attempts())
    return [(attempt, entry) for attempt, entry in found if entry is not None]


def pipeline_run(stage: StageDir) -> str:
    """The unique id of the pipeline run that the stage was last tracked under; empty if it never was."""
    return next((entry.pipeline_run for _, entry in reversed(entries(stage)) if entry.pipeline_run), "")


def curves(stage: StageDir) -> Iterable[list[tuple[Attempt, Entry]]]:
    """The attempts of each curve, oldest first."""
    by_curve: dict[str, list[tuple[Attempt, Entry]]] = {}
    for attempt, entry in entries(stage):
        by_curve.setdefault(entry.curve, []).append((attempt, entry))
    return by_curve.values()


def _created(record: Record) -> float:
    return datetime.fromisoformat(record.created).timestamp()


def _file(attempt: Attempt) -> Path:
    return attempt.path / "tracking.json"


def _begun(attempt: Attempt) -> Path:
    return attempt.path / "begun.json"


def _read(attempt: Attempt) -> Entry | None:
    """None where the attempt was not tracked, or both files were damaged since: no training stops for that."""
    return next((entry for path in (_file(attempt), _begun(attempt)) if (entry := _parse(path))), None)


def _parse(path: Path) -> Entry | None:
    data = read_json(path, "parents", "ended")
    if data is None:
        return None
    try:
        ended = data["ended"]
        if ended is not None:
            ending = ended | {"published": Published(**ended["published"]) if ended["published"] else None}
            data["ended"] = Ending(**ending)
        return Entry(**(data | {"parents": [Parent(**parent) for parent in data["parents"]]}))
    except (TypeError, KeyError):
        return None
