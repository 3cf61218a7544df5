"""The report of an evaluation: scores with intervals, the fusion table, and the final metrics, from counts."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from typing import Any

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine.episodes import describe_episodes
from opdctl.engine.grader import Agreement
from opdctl.engine.loop import Metrics, role
from opdctl.engine.scores import (
    CellCounts,
    FusionTable,
    by_domain,
    fusion_tables,
    normalised_score,
    wilson_interval,
)
from opdctl.engine.teachers import Router
from opdctl.settings import EvalSettings, HarnessSettings


@dataclass(frozen=True)
class CellScore:
    """What one model did in one cell."""

    counts: CellCounts
    pass_k: dict[str, float]  # k -> unbiased estimate, mean over prompts
    agreement: Agreement | None = None  # of the settings' grader with the verifier, where it grades the task
    episodes: dict[str, float] | None = None  # sums of what its episodes counted


def examined(spec: StageSpec) -> list[InputSpec]:
    """The models to score; the others only help."""
    return [given for given in spec.inputs if given.role not in ("budget", "grader")]


def cell_name(task: str, effort: str | None) -> str:
    return f"{task}.{effort}" if effort else task


def means(scores: Mapping[str, CellScore]) -> Metrics:
    """Means over the cells."""
    counts = [score.counts for score in scores.values()]
    metrics = {
        "accuracy": sum(c.correct / c.n for c in counts) / len(counts),
        "length": sum(c.mean_length for c in counts) / len(counts),
        "truncated": sum(c.truncation_rate for c in counts) / len(counts),
    }
    if all(c.within is not None for c in counts):
        metrics["within_budget"] = sum((c.within or 0) / c.n for c in counts) / len(counts)
    return metrics


def report_of(
    spec: StageSpec, settings: EvalSettings | HarnessSettings, scores: Mapping[str, Mapping[str, CellScore]]
) -> tuple[dict[str, Any], Metrics]:
    """The whole report, and its final metrics: per model and per (model, cell)."""
    cells = list(next(iter(scores.values())))
    described = {
        label: {name: _describe(score, settings.confidence) for name, score in of.items()}
        for label, of in scores.items()
    }
    counted = [score.counts for of in scores.values() for score in of.values()]
    metrics: Metrics = {
        "sampled_tokens": float(sum(counts.length_sum for counts in counted)),
        "sampled_completions": float(sum(counts.n for counts in counted)),
    }
    for label, of in scores.items():
        metrics |= {f"{label}/{name}": value for name, value in means(of).items()}
        for name, score in of.items():
            metrics[f"{label}/{name}/accuracy"] = score.counts.correct / score.counts.n
            metrics[f"{label}/{name}/length"] = score.counts.mean_length
            if score.agreement is not None and score.agreement.told:
                metrics[f"{label}/{name}/agreement"] = score.agreement.agree / score.agreement.told
            if (played := _episodes(score)) is not None:
                metrics |= {f"{label}/{name}/{key}": played[key] for key in ("turns", "valid_calls")}
    tables = _fusion(spec, settings, scores)
    normalised = {
        f"{table.model}/{table.metric}": value for table in tables if (value := _normalised(table)) is not None
    }
    metrics |= {f"{name}/normalised_score": score for name, score in normalised.items()}
    report = {
        "cells": cells,
        "confidence": settings.confidence,
        "roles": {given.label: given.role for given in examined(spec)},
        "models": described,
        "means": {label: means(of) for label, of in scores.items()},
        "fusion": [table.as_json() for table in tables],
        "normalised_score": normalised,
    }
    return report, metrics


def _describe(score: CellScore, confidence: float) -> dict[str, Any]:
    counts = score.counts
    return {
        **asdict(counts),
        "accuracy": asdict(counts.estimate("accuracy", confidence)),
        "within_budget": None if counts.within is None else asdict(counts.estimate("within", confidence)),
        "length_mean": counts.mean_length,
        "truncation_rate": counts.truncation_rate,
        "pass_k": score.pass_k,
        "grader": score.agreement and _describe_agreement(score.agreement, confidence),
        "episodes": _episodes(score),
    }


def _episodes(score: CellScore) -> Metrics | None:
    return None if score.episodes is None else describe_episodes(score.episodes, score.counts.n)


def _describe_agreement(counts: Agreement, confidence: float) -> dict[str, Any]:
    """Counts, and with intervals the share of agreement, of wrong answers accepted, of right ones rejected."""

    def rate(part: int, whole: int) -> dict[str, float] | None:
        return asdict(wilson_interval(part, whole, confidence)) if whole else None

    return {
        **asdict(counts),
        "agreement": rate(counts.agree, counts.told),
        "false_accept_rate": rate(counts.false_accepts, counts.wrong),
        "false_reject_rate": rate(counts.false_rejects, counts.right),
    }


def _fusion(
    spec: StageSpec, settings: EvalSettings | HarnessSettings, scores: Mapping[str, Mapping[str, CellScore]]
) -> list[FusionTable]:
    """Tables of each student after against the student before and the routed teachers, where all three are given. Tasks
    of a harness have no teachers: labels are of the pipeline's own tasks."""
    before, teachers, after = (role(spec, name) for name in ("before", "teachers", "after"))
    if not (before and teachers and after) or isinstance(settings, HarnessSettings):
        return []
    counts = {label: {name: score.counts for name, score in of.items()} for label, of in scores.items()}
    by_cell = {cell: teachers[number].label for cell, number in routes(settings, teachers).items()}
    return fusion_tables(
        counts[before[0].label],
        {teacher.label: counts[teacher.label] for teacher in teachers},
        {student.label: counts[student.label] for student in after},
        by_cell,
        confidence=settings.confidence,
    )


def routes(settings: EvalSettings, teachers: Items[InputSpec]) -> dict[str, int]:
    """Each cell's teacher, by its number."""
    columns = [name for name in ("domain", "effort") if all(name in teacher.route for teacher in teachers)]
    router = Router(teachers, columns, None)
    efforts: Items[str | None] = settings.data.efforts or [None]
    return {
        cell_name(task, effort): router.teacher({"domain": task, "effort": effort or ""})
        for task in settings.data.tasks
        for effort in efforts
    }


def _normalised(table: FusionTable) -> float | None:
    """MOPD's normalised score with a task as domain and its efforts as benchmarks."""
    columns = ({row.cell: getattr(row, name).value for row in table.rows} for name in ("before", "teacher", "after"))
    return normalised_score(*map(by_domain, columns))
