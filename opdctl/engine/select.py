"""Selection: of several models that an eval stage has scored, the best one is published again as it is.

A candidate is found in the report by its checkpoint, not by its label: an eval stage that is reused from another
pipeline may call it otherwise.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec
from opdctl.engine.loop import role
from opdctl.engine.recovery import write_whole
from opdctl.errors import StageRefused
from opdctl.records import RECORD, SELECTION, read_record
from opdctl.references import near_miss
from opdctl.settings import SelectSettings

PUBLISHED = (".safetensors", ".json", ".txt", ".model", ".jinja")  # weights, configuration, any tokenizer's files


def run(spec: StageSpec, control: Control) -> StageResult:
    """Publish the files of the winner among role `models`, and selection.json with the scores of all.

    A candidate's score is the plain mean of `config.metric` over `config.cells`, all of the report's where empty; of
    equal ones the first wins. Raises StageRefused for a candidate that the report does not score, an unknown cell, and
    a metric that the report lacks.
    """
    settings = SelectSettings.model_validate(spec.config)
    candidates, report = role(spec, "models"), role(spec, "report")[0]
    folder = Path(report.path)
    scored, known, names = _read(folder)
    cells = settings.cells or known
    if unknown := [cell for cell in cells if cell not in known]:
        raise StageRefused(
            f"{report.label} has no cell '{unknown[0]}'" + near_miss(unknown[0], known, "cells"),
            hint="correct config.cells of the stage",
        )
    scores = {
        given.label: _score(given, report.label, settings.metric, cells, scored.get(names.get(given.source, "")))
        for given in candidates
    }
    choose = max if settings.best == "highest" else min
    winner = choose(candidates, key=lambda given: scores[given.label])
    record = read_record(Path(winner.path))
    selection = {
        "metric": settings.metric,
        "best": settings.best,
        "cells": cells,
        "scores": scores,
        "winner": winner.label,
        "record": None if isinstance(record, str) else record.id,
    }
    _publish(Path(winner.path), Path(spec.output), shared=not isinstance(record, str))
    write_whole(Path(spec.output) / SELECTION, selection)
    control.emit(len(candidates), len(candidates), {"score": scores[winner.label]}, phase="select")
    metrics = {f"{label}/score": score for label, score in scores.items()}
    return StageResult(step=len(candidates), metrics=metrics | {"score": scores[winner.label]})


def _read(folder: Path) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Of an eval stage's checkpoint: scores by model and cell; the cells; what the report calls each model, by the
    record id of its checkpoint, or by the reference of one from outside."""
    record = read_record(folder)
    if isinstance(record, str):
        raise StageRefused(record, hint="--rerun of the eval stage makes the report anew")
    try:
        report = json.loads((folder / "report.json").read_text())
        roles = dict(report["roles"])
        names = {p.record_id or p.ref: p.label for p in record.parents if roles.get(p.label) == p.role}
        return dict(report["models"]), list(report["cells"]), names
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageRefused(
            f"{folder / 'report.json'} is no report of an eval stage: {type(error).__name__}: {error}",
            hint="inputs.report is the eval stage that scores the models",
        ) from error


def _score(given: InputSpec, report: str, metric: str, cells: Sequence[str], scores: Mapping[str, Any] | None) -> float:
    if scores is None:
        raise StageRefused(
            f"{report} does not score '{given.label}'",
            hint="add the model to the inputs of the eval stage, or leave it out here",
        )
    values = [scores[cell].get(metric) for cell in cells]
    if None in values:
        raise StageRefused(
            f"{report} holds no {metric} of '{given.label}'",
            hint="config.within of the eval stage makes it count within_budget",
        )
    numbers = [float(value["value"] if isinstance(value, dict) else value) for value in values]  # rates have intervals
    return sum(numbers) / len(numbers)


def _publish(source: Path, output: Path, *, shared: bool) -> None:
    """The model's files under their names. A checkpoint of opdctl never changes, so its bytes can be shared; a folder
    of the user's is copied."""
    for path in sorted(source.iterdir()):
        if path.suffix not in PUBLISHED or path.name == RECORD or not path.is_file():
            continue
        try:
            if not shared:
                raise OSError
            os.link(path, output / path.name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, output / path.name)
