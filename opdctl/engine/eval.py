"""Evaluation: every model on every cell (task x effort) of held-out prompts, and the fusion table."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec, Stopped
from opdctl.engine.advantages import over_budget
from opdctl.engine.effort import BudgetEstimator
from opdctl.engine.loop import Metrics, open_policy, open_tasks, role
from opdctl.engine.recovery import damaged, write_whole
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.scores import CellCounts, FusionTable, fusion_tables, normalised_score, pass_at_k, wilson_interval
from opdctl.engine.teachers import Router
from opdctl.errors import StageRefused
from opdctl.settings import EvalSettings


@dataclass(frozen=True)
class CellScore:
    """What one model did in one cell."""

    counts: CellCounts
    pass_k: dict[str, float]  # k -> unbiased estimate, mean over prompts


def run(spec: StageSpec, control: Control) -> StageResult:
    """Score each input model; publish `report.json`. Scored models are kept in the state folder across attempts."""
    settings = EvalSettings.model_validate(spec.config)
    models = [given for given in spec.inputs if given.role != "budget"]
    examiner = _Examiner(spec, settings, models)
    scores: dict[str, dict[str, CellScore]] = {}
    for number, model in enumerate(models):
        kept = Path(spec.state) / f"scored-{zlib.crc32(model.label.encode()):08x}.json"
        if kept.exists():
            scores[model.label] = _read(kept, examiner.cells)
        else:
            if control.stop_requested():
                raise Stopped
            scores[model.label] = examiner.score(model)
            write_whole(kept, {name: asdict(score) for name, score in scores[model.label].items()})
        control.emit(number + 1, len(models), _means(scores[model.label]), phase=model.label)
    report, metrics = _report(spec, settings, scores)
    write_whole(Path(spec.output) / "report.json", report)
    return StageResult(step=len(models), metrics=metrics)


class _Examiner:
    """Asks models the held-out prompts. Every model and every effort gets the same problems and random numbers."""

    def __init__(self, spec: StageSpec, settings: EvalSettings, models: Sequence[InputSpec]) -> None:
        self.spec, self.settings = spec, settings
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "eval", settings.seed)
        self.cells = [cell_name(task, effort) for task, effort in self.mixer.cells]
        tokens = settings.rollout.max_prompt_tokens + settings.rollout.max_completion_tokens
        self.batch = max(1, int(spec.resources["micro_batch_tokens"]) // tokens)
        self.budgets: BudgetEstimator | None = None
        if settings.within is not None:
            given = (role(spec, "budget") or role(spec, "before") or list(models))[0]
            cold_start, tokenizer = open_policy(spec, given)
            renderer = Renderer(tokenizer, cold_start.eos_ids)
            self.budgets = BudgetEstimator(
                cold_start.requires_grad_(False), self.mixer, renderer, settings.within.budget, settings.rollout
            )

    def score(self, model: InputSpec) -> dict[str, CellScore]:
        policy, tokenizer = open_policy(self.spec, model)
        policy.requires_grad_(False)
        renderer = Renderer(tokenizer, policy.eos_ids)
        size, per_call = self.settings.rollout.group_size, max(1, self.batch // self.settings.rollout.group_size)
        scores = {}
        for cell, (_, effort) in enumerate(self.mixer.cells):
            rows = self._rows(cell)
            completions: list[list[int]] = []
            finished: list[bool] = []
            for at in range(0, len(rows), per_call):
                seed = stream_seed(self.settings.seed, "eval-sample")
                part = rows[at : at + per_call]
                _, rollout = roll(policy, renderer, part, self.settings.rollout, seed=seed, group_size=size)
                completions += rollout.completions
                finished += rollout.finished
            scores[self.cells[cell]] = self._count(rows, completions, finished, renderer, effort)
        return scores

    def _rows(self, cell: int) -> list[Row]:
        wanted = self.settings.rollout.prompts
        task = self.mixer.cells[cell][0]
        size = self.tasks[task].size("eval")
        if size is not None and size < wanted:
            raise StageRefused(
                f"task {task} has {size} held-out rows and config.rollout.prompts asks for {wanted}",
                hint="lower config.rollout.prompts of the eval stage, or hold out more rows",
            )
        return self.mixer.cell_rows(cell, 0, wanted)

    def _count(
        self,
        rows: list[Row],
        completions: list[list[int]],
        finished: list[bool],
        renderer: Renderer,
        effort: str | None,
    ) -> CellScore:
        size = self.settings.rollout.group_size
        verdicts = judge(self.tasks, rows, renderer.texts(completions), size)
        correct = torch.tensor([v.correct and done for v, done in zip(verdicts, finished, strict=True)])
        lengths = torch.tensor([len(completion) for completion in completions])
        within = None
        if self.budgets is not None and self.settings.within is not None and effort is not None:
            b0, tau = self.budgets.budgets(rows, batch=self.batch), self.settings.within.tau[effort]
            over = [over_budget(n, tau, b0[i // size]) for i, n in enumerate(lengths.tolist())]
            within = int((correct & ~torch.tensor(over)).sum())
        counts = CellCounts(
            n=len(completions),
            correct=int(correct.sum()),
            within=within,
            length_sum=int(lengths.sum()),
            truncated=finished.count(False),
        )
        solved = correct.view(len(rows), size).sum(1).tolist()
        pass_k = {str(k): sum(pass_at_k(size, int(c), k) for c in solved) / len(rows) for k in self.settings.pass_k}
        return CellScore(counts, pass_k)


def cell_name(task: str, effort: str | None) -> str:
    return f"{task}.{effort}" if effort else task


def _read(path: Path, cells: Sequence[str]) -> dict[str, CellScore]:
    try:
        stored = json.loads(path.read_text())
        return {name: CellScore(CellCounts(**stored[name]["counts"]), stored[name]["pass_k"]) for name in cells}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def _means(scores: Mapping[str, CellScore]) -> Metrics:
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


def _report(
    spec: StageSpec, settings: EvalSettings, scores: Mapping[str, Mapping[str, CellScore]]
) -> tuple[dict[str, Any], Metrics]:
    """The whole report, and its final metrics: per model and per (model, cell)."""
    cells = list(next(iter(scores.values())))
    described = {
        label: {name: _describe(score, settings.confidence) for name, score in of.items()}
        for label, of in scores.items()
    }
    metrics: Metrics = {}
    for label, of in scores.items():
        metrics |= {f"{label}/{name}": value for name, value in _means(of).items()}
        for name, score in of.items():
            metrics[f"{label}/{name}/accuracy"] = score.counts.correct / score.counts.n
            metrics[f"{label}/{name}/length"] = score.counts.mean_length
    tables = _fusion(spec, settings, scores)
    normalised = {
        f"{table.model}/{table.metric}": value for table in tables if (value := _normalised(table)) is not None
    }
    metrics |= {f"{name}/normalised_score": score for name, score in normalised.items()}
    report = {
        "cells": cells,
        "confidence": settings.confidence,
        "roles": {given.label: given.role for given in spec.inputs if given.role != "budget"},
        "models": described,
        "means": {label: _means(of) for label, of in scores.items()},
        "fusion": [table.as_json() for table in tables],
        "normalised_score": normalised,
    }
    return report, metrics


def _describe(score: CellScore, confidence: float) -> dict[str, Any]:
    counts = score.counts
    return {
        **asdict(counts),
        "accuracy": asdict(wilson_interval(counts.correct, counts.n, confidence)),
        "within_budget": None
        if counts.within is None
        else asdict(wilson_interval(counts.within, counts.n, confidence)),
        "length_mean": counts.mean_length,
        "truncation_rate": counts.truncation_rate,
        "pass_k": score.pass_k,
    }


def _fusion(
    spec: StageSpec, settings: EvalSettings, scores: Mapping[str, Mapping[str, CellScore]]
) -> list[FusionTable]:
    """Tables of each student after against the student before and the routed teachers, where all three are given."""
    before, teachers, after = (role(spec, name) for name in ("before", "teachers", "after"))
    if not (before and teachers and after):
        return []
    counts = {label: {name: score.counts for name, score in of.items()} for label, of in scores.items()}
    columns = [name for name in ("domain", "effort") if all(name in teacher.route for teacher in teachers)]
    router = Router(teachers, columns, None)
    efforts: Sequence[str | None] = settings.data.efforts or [None]
    routes = {
        cell_name(task, effort): teachers[router.teacher({"domain": task, "effort": effort or ""})].label
        for task in settings.data.tasks
        for effort in efforts
    }
    return fusion_tables(
        counts[before[0].label],
        {teacher.label: counts[teacher.label] for teacher in teachers},
        {student.label: counts[student.label] for student in after},
        routes,
        confidence=settings.confidence,
    )


def _normalised(table: FusionTable) -> float | None:
    """MOPD's normalised score with a task as domain and its efforts as benchmarks."""

    def scores(column: str) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for row in table.rows:
            task, _, effort = row.cell.partition(".")
            found.setdefault(task, {})[effort] = getattr(row, column).value
        return found

    return normalised_score(scores("before"), scores("teacher"), scores("after"))
