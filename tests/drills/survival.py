"""What must hold once a disturbed run has come to its end. Reads the disk and the tracking database, starts nothing."""

import fcntl
import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from drills.pipelines import RUN
from drills.scene import Scene
from opdctl.repair import repair
from opdctl.store import RunDir, Workspace
from opdctl.verify import Verifier

ORPHANS_S = 60.0  # that processes get to end by themselves
MEASURED = ("tokens_per_s", "seconds", "_s", "_gib")  # ends of the names of metrics that measure the machine

Points = dict[str, dict[str, list[tuple[int, float]]]]  # stage -> metric -> (step, value)


def problems(scene: Scene) -> list[str]:
    """What does not hold, a line each."""
    found = [f"orphan: process {pid}, {role}" for pid, role in scene.family.left(ORPHANS_S).items()]
    found += _weights(scene)
    found += _records(Workspace(scene.workspace).run(RUN))
    found += _lock(scene.folder / ".lock")
    found += _judged_by_itself(scene)
    found += [f"run {at} told a bug" for at, run in enumerate(scene.runs, 1) if "unexpected error, a bug" in run.told()]
    if scene.tracked:
        found += _metrics(scene)
    return found


def digests(scene: Scene) -> dict[str, str]:
    """File of a checkpoint in force -> sha256: weights, reports."""
    found = {}
    for link in sorted(scene.folder.glob("stages/**/checkpoint")):
        for file in (link / "model.safetensors", link / "report.json"):
            if file.exists():
                found[str(file.relative_to(scene.folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _weights(scene: Scene) -> Iterator[str]:
    found, expected = digests(scene), scene.undisturbed.digests
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            yield f"{name}: {found.get(name, 'missing')[:12]} instead of {expected.get(name, 'nothing')[:12]}"


def _records(run: RunDir) -> Iterator[str]:
    for stage in run.stages():
        yield from (f"{stage.name}: {line}" for line in stage.verify_digests(full=True))
        if (record := stage.record()) is None:
            yield f"{stage.name}: no record"
            continue
        for parent in record.parents:
            if parent.record_id is not None and run.workspace.checkpoint(parent.record_id) is None:
                yield f"{stage.name}: its parent {parent.ref} ({parent.record_id}) is gone"
        if stage.unfinished() is not None:
            yield f"{stage.name}: finished, and half-trained state is left"
    if run.busy():
        yield "the run says that it is busy"


def _judged_by_itself(scene: Scene) -> Iterator[str]:
    """`opdctl verify`, and what `opdctl repair` would do."""
    workspace = Workspace(scene.workspace)
    for finding in Verifier(workspace).verify().problems:
        if not any(name in f"{finding.subject} {finding.told}" for name in scene.destroyed):
            yield f"verify: {finding.subject}: {finding.told}"
    for left in repair(workspace, workspace.runs(), dry_run=True):
        yield f"repair: {left.stage}: {left.what}: {left.told}"


def _lock(path: Path) -> Iterator[str]:
    with path.open("r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield "the run's lock is held"


# ---------------------------------------------------------------------------------------------- tracking


def points(scene: Scene) -> tuple[Points, list[str]]:
    """What MLflow has of each stage, and what is wrong with it at first sight. Several runs of a stage are told apart
    as `stage`, `stage (2)`, ..."""
    found: Points = {}
    wrong: list[str] = []
    killed: dict[str, str] = {}
    with sqlite3.connect(f"file:{scene.workspace / 'mlflow.db'}?mode=ro", uri=True) as database:
        runs = database.execute(
            "select r.run_uuid, r.status, t.value from runs r left join tags t"
            " on t.run_uuid = r.run_uuid and t.key = 'stage' order by r.start_time"
        ).fetchall()
        for uuid, status, stage in runs:
            if stage is None:
                wrong += [f"MLflow: the pipeline's run is {status}"] if status != "FINISHED" else []
                continue
            name, number = stage, 2
            while name in found:
                name, number = f"{stage} ({number})", number + 1
            if status != "FINISHED":
                killed[name] = status
            found[name] = {}
            rows = database.execute("select key, step, value from metrics where run_uuid = ? order by step", (uuid,))
            for key, step, value in rows:
                found[name].setdefault(key, []).append((step, value))
        if len([stage for *_, stage in runs if stage is None]) != 1:
            wrong.append("MLflow: not one run of the pipeline")
    wrong += [f"MLflow: {name} is {status}" for name, status in killed.items() if not _given_up(scene, name, found)]
    return found, wrong


def _given_up(scene: Scene, name: str, found: Points) -> bool:
    """Is it of a training that was begun from a checkpoint which was destroyed, and another was begun since?"""
    stage = name.partition(" (")[0]
    return stage in scene.repeated and name != [other for other in found if other.partition(" (")[0] == stage][-1]


def _metrics(scene: Scene) -> Iterator[str]:
    found, wrong = points(scene)
    expected = scene.undisturbed.points
    yield from wrong
    for name in sorted({*found, *expected}):
        stage = name.partition(" (")[0]
        if name not in expected and stage not in scene.repeated:
            yield f"MLflow: {name} is one too many"
            continue
        if name not in found:
            yield f"MLflow: {name} is missing"
            continue
        if _given_up(scene, name, found):
            continue
        for metric in sorted({*found[name], *expected[stage]}):
            yield from _compare(scene, stage, metric, found[name].get(metric, []), expected[stage].get(metric, []))


def _compare(
    scene: Scene, stage: str, metric: str, found: list[tuple[int, float]], expected: list[tuple[int, float]]
) -> Iterator[str]:
    steps = [step for step, _ in found]
    wanted = [step for step, _ in expected if (stage, step) not in scene.lost_events]
    told = [step for step in steps if (stage, step) not in scene.lost_events]
    if len(set(steps)) < len(steps):
        yield f"MLflow: {stage}: {metric} has points twice: {steps}"
    elif told != wanted:
        yield f"MLflow: {stage}: {metric} has steps {steps} instead of {wanted}"
    elif not metric.endswith(MEASURED):
        values = dict(expected)
        for step, value in found:
            if not math.isclose(value, values[step], rel_tol=1e-9):
                yield f"MLflow: {stage}: {metric} at step {step} is {value} instead of {values[step]}"


def note(scene: Scene) -> str:
    """What happened, for a failure's report."""
    logs = [
        f"--- run {number}: exit code {running.process.returncode}\n{running.told()[-2500:]}"
        for number, running in enumerate(scene.runs, start=1)
    ]
    return "\n".join([json.dumps(scene.notes), *logs])
