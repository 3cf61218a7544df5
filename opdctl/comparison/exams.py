"""Finished eval stages: who was examined, by which settings, and what came out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opdctl.engine.scores import Estimate
from opdctl.records import Record, read_json
from opdctl.references import unseeded, without_seeds
from opdctl.store import RunDir, StageDir

METRICS = {"accuracy": "accuracy", "within": "within_budget"}  # ours -> name in report.json


@dataclass(frozen=True)
class Exam:
    """A finished eval stage: one seed."""

    run: RunDir
    stage: str  # without the seed
    seed: int
    report: Mapping[str, Any]
    record: Record
    settings: str  # of the whole run but its seeds and its machine
    routes: Mapping[str, str] = field(default_factory=dict)  # cell -> teacher's label

    def students(self) -> dict[str, str]:
        """Label without the seed -> label in the report: the models after, or all where nothing is.

        An evaluation of several seeds of one model names each in full.
        """
        roles: Mapping[str, str] = self.report["roles"]
        ordered = list(dict.fromkeys([*(part["model"] for part in self.report["fusion"]), *roles]))
        chosen = [label for label in ordered if roles[label] == "after"] or ordered
        plain = {unseeded(label)[0]: label for label in chosen}
        return plain if len(plain) == len(chosen) else {label: label for label in chosen}

    def labels(self, role: str) -> list[str]:
        return [label for label, its in self.report["roles"].items() if its == role]

    def estimate(self, label: str, cell: str, metric: str) -> Estimate:
        found = self.report["models"][label][cell][METRICS[metric]]
        return Estimate(found["value"], found["low"], found["high"])

    def has(self, metric: str) -> bool:
        models = self.report["models"].values()
        return all(cell[METRICS[metric]] is not None for model in models for cell in model.values())

    def made(self, label: str) -> StageDir | None:
        """The stage that made a model, as it was when it was evaluated."""
        ids = [parent.record_id for parent in self.record.parents if parent.label == label]
        return self.run.workspace.checkpoint(ids[0]) if ids and ids[0] else None


def exams_of(run: RunDir, notes: list[str]) -> Iterator[Exam]:
    pipeline = run.read_pipeline()
    settings = _settings(pipeline)
    found: list[Exam] = []
    for name, stage in pipeline.get("stages", {}).items():
        directory = run.stage(name)
        record = directory.record() if stage.get("kind") == "eval" else None
        report = read_json(directory.checkpoint / "report.json", "cells", "models", "roles", "fusion")
        damage = directory.damage() if stage.get("kind") == "eval" else ""
        if damage or (record is not None and not _whole(report)):
            why = damage or "its report.json says nothing that can be read"
            notes.append(
                f"run {run.name}: {name} is left out, for it is damaged: {why}; run it again: --rerun '{name}'"
            )
        if record is None or report is None or not _whole(report):
            continue
        plain, seed = unseeded(name)
        rows = [row for part in report["fusion"][:1] for row in part["rows"]]
        routes = {row["cell"]: row["teacher_label"] for row in rows}
        chosen = int(pipeline.get("seed", 0)) if seed is None else seed
        found.append(Exam(run, plain, chosen, report, record, settings, routes))
    examined = [exam for exam in found if exam.labels("after")] or found
    if not examined:
        notes.append(f"run {run.name}: no eval stage has finished, so nothing of it can be compared")
    yield from examined


def _whole(report: Mapping[str, Any] | None) -> bool:
    """Does it tell of every model in every cell?"""
    if report is None:
        return False
    models, cells = report["models"], report["cells"]
    return bool(models) and all(set(by_cell) == set(cells) for by_cell in models.values())


def _settings(pipeline: Mapping[str, Any]) -> str:
    """All but the seeds and the machine, to be compared."""
    apart = ("seed", "seeds", "machine", "workers", "tracking", "stages")
    plain = {key: value for key, value in pipeline.items() if key not in apart}
    stages = {}
    for name, stage in pipeline.get("stages", {}).items():
        own = {key: value for key, value in stage.items() if key not in ("seed", "resources", "gates", "labels")}
        stages[unseeded(name)[0]] = own
    return without_seeds(json.dumps(plain | {"stages": stages}, sort_keys=True))
