"""Evaluation: every model on every cell (task x effort) of held-out prompts, and the fusion table."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec, Stopped
from opdctl.engine.advantages import over_budget
from opdctl.engine.effort import BudgetEstimator
from opdctl.engine.grader import Agreement, Graded, open_grader
from opdctl.engine.loop import Metrics, completions_per_call, open_policy, open_tasks, role
from opdctl.engine.recovery import damaged, write_whole
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import Completions, Generate, sample
from opdctl.engine.scores import (
    CellCounts,
    FusionTable,
    by_domain,
    fusion_tables,
    normalised_score,
    pass_at_k,
    wilson_interval,
)
from opdctl.engine.teachers import Router
from opdctl.errors import StageRefused
from opdctl.settings import EvalSettings, Rollout


@dataclass(frozen=True)
class CellScore:
    """What one model did in one cell."""

    counts: CellCounts
    pass_k: dict[str, float]  # k -> unbiased estimate, mean over prompts
    agreement: Agreement | None = None  # of the settings' grader with the verifier, where it grades the task


@dataclass(frozen=True)
class Candidate:
    """A model under examination."""

    generate: Generate[Completions]
    renderer: Renderer
    batch: int | None  # completions drawn in one call; None: all of a model's, the engine makes its own batches


Opener = Callable[[InputSpec], AbstractContextManager[Candidate]]


def run(spec: StageSpec, control: Control, opener: Opener | None = None) -> StageResult:
    """Score each input model; publish `report.json`. Scored models are kept in the state folder across attempts.

    `opener` opens a model for as long as it is asked; absent: in this process. One is open at a time.
    """
    settings = EvalSettings.model_validate(spec.config)
    models = _examined(spec)
    examiner = _Examiner(spec, settings, models, opener or in_this_process(spec, settings.rollout))
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


def in_this_process(spec: StageSpec, rollout: Rollout) -> Opener:
    """Opens models in the embedded engine."""
    batch = completions_per_call(spec, rollout)

    @contextmanager
    def opened(given: InputSpec) -> Iterator[Candidate]:
        policy, tokenizer = open_policy(spec, given)
        policy.requires_grad_(False)
        yield Candidate(partial(sample, policy), Renderer(tokenizer, policy.eos_ids), batch)

    return opened


class _Examiner:
    """Asks models the held-out prompts. Every model and every effort gets the same problems and random numbers."""

    def __init__(self, spec: StageSpec, settings: EvalSettings, models: Sequence[InputSpec], opener: Opener) -> None:
        self.spec, self.settings, self.models, self.opener = spec, settings, models, opener
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "eval", settings.seed)
        self.cells = [cell_name(task, effort) for task, effort in self.mixer.cells]

    def score(self, model: InputSpec) -> dict[str, CellScore]:
        budgets = self.budgets  # before the model is opened: they may take another one
        with self.opener(model) as candidate:
            completions, finished = self._answers(candidate)
            texts = candidate.renderer.texts(completions)
            graded = self._graded(candidate, texts)
        size = len(completions) // len(self.cells)
        scores: dict[str, CellScore] = {}
        for cell, name in enumerate(self.cells):
            own = slice(cell * size, (cell + 1) * size)
            lengths = [len(completion) for completion in completions[own]]
            b0 = budgets[cell] if budgets else None
            scores[name] = self._count(cell, texts[own], lengths, finished[own], b0, graded.get(cell))
        return scores

    def _graded(self, candidate: Candidate, texts: list[str]) -> dict[int, Graded]:
        """What the settings' grader makes of the completions, by the cell; only of its tasks."""
        if self.settings.grader is None:
            return {}
        grader = open_grader(self.spec, self.settings.grader, self.tasks, candidate.generate, candidate.renderer)
        size, group = len(texts) // len(self.cells), self.settings.rollout.group_size
        return {
            cell: grader.grade(self.rows[cell], texts[cell * size : (cell + 1) * size], group)
            for cell, (task, _) in enumerate(self.mixer.cells)
            if task in self.settings.grader.tasks
        }

    @cached_property
    def rows(self) -> list[list[Row]]:
        """Of each cell, equally many."""
        wanted = self.settings.rollout.prompts
        for task in self.settings.data.tasks:
            size = self.tasks[task].size("eval")
            if size is not None and size < wanted:
                raise StageRefused(
                    f"task {task} has {size} held-out rows and config.rollout.prompts asks for {wanted}",
                    hint="lower config.rollout.prompts of the eval stage, or hold out more rows",
                )
        return [self.mixer.cell_rows(cell, 0, wanted) for cell in range(len(self.cells))]

    @cached_property
    def budgets(self) -> list[list[float]] | None:
        """b0 of each cell's rows, by the cold-start model's own answers; kept in the state folder across attempts."""
        if self.settings.within is None:
            return None
        kept = Path(self.spec.state) / "budgets.json"
        if not kept.exists():
            given = (role(self.spec, "budget") or role(self.spec, "before") or list(self.models))[0]
            with self.opener(given) as cold_start:
                estimator = BudgetEstimator(
                    cold_start.generate,
                    self.mixer,
                    cold_start.renderer,
                    self.settings.within.budget,
                    self.settings.rollout,
                )
                found = [estimator.budgets(rows, batch=cold_start.batch) for rows in self.rows]
            write_whole(kept, found)
        try:
            stored = json.loads(kept.read_text())
            return [
                [float(b0) for _, b0 in zip(rows, of, strict=True)] for rows, of in zip(self.rows, stored, strict=True)
            ]
        except (OSError, ValueError, TypeError) as error:
            raise damaged(kept, error) from error

    def _answers(self, candidate: Candidate) -> tuple[list[list[int]], list[bool]]:
        """Completions of all cells one after another, prompt-major, and whether they ended."""
        size, options = self.settings.rollout.group_size, self.settings.rollout
        if candidate.batch is None:
            calls = [[row for rows in self.rows for row in rows]]
        else:
            step = max(1, candidate.batch // size)
            calls = [rows[at : at + step] for rows in self.rows for at in range(0, len(rows), step)]
        completions: list[list[int]] = []
        finished: list[bool] = []
        seed = stream_seed(self.settings.seed, "eval-sample")
        for rows in calls:
            _, drawn = roll(candidate.generate, candidate.renderer, rows, options, seed=seed, group_size=size)
            completions += drawn.completions
            finished += drawn.finished
        return completions, finished

    def _count(
        self,
        cell: int,
        texts: list[str],
        lengths: list[int],
        finished: list[bool],
        b0: list[float] | None,
        graded: Graded | None,
    ) -> CellScore:
        size, (_, effort) = self.settings.rollout.group_size, self.mixer.cells[cell]
        verdicts = judge(self.tasks, self.rows[cell], texts, size)
        correct = [verdict.correct and done for verdict, done in zip(verdicts, finished, strict=True)]
        within = None
        if b0 is not None and self.settings.within is not None and effort is not None:
            tau = self.settings.within.tau[effort]
            within = [
                right and not over_budget(n, tau, b0[i // size])
                for i, (right, n) in enumerate(zip(correct, lengths, strict=True))
            ]
        solved, inside = _by_prompt(correct, size), _by_prompt(within or [], size)
        counts = CellCounts(
            n=len(correct),
            correct=sum(correct),
            within=None if within is None else sum(within),
            length_sum=sum(lengths),
            truncated=finished.count(False),
            group_size=size,
            correct_squares=sum(c * c for c in solved),
            within_squares=sum(c * c for c in inside),
        )
        pass_k = {str(k): sum(pass_at_k(size, c, k) for c in solved) / len(solved) for k in self.settings.pass_k}
        return CellScore(counts, pass_k, graded.agreement(correct) if graded else None)


def _examined(spec: StageSpec) -> list[InputSpec]:
    """The models to score; the others only help."""
    return [given for given in spec.inputs if given.role not in ("budget", "grader")]


def _by_prompt(right: Sequence[bool], size: int) -> list[int]:
    """How many of each prompt's completions are right."""
    return [sum(right[at : at + size]) for at in range(0, len(right), size)]


def cell_name(task: str, effort: str | None) -> str:
    return f"{task}.{effort}" if effort else task


def _read(path: Path, cells: Sequence[str]) -> dict[str, CellScore]:
    try:
        stored = json.loads(path.read_text())
        return {name: _score(**stored[name]) for name in cells}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def _score(counts: dict[str, Any], pass_k: dict[str, float], agreement: dict[str, Any] | None) -> CellScore:
    return CellScore(CellCounts(**counts), pass_k, Agreement(**agreement) if agreement else None)


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
    counted = [score.counts for of in scores.values() for score in of.values()]
    metrics: Metrics = {
        "sampled_tokens": float(sum(counts.length_sum for counts in counted)),
        "sampled_completions": float(sum(counts.n for counts in counted)),
    }
    for label, of in scores.items():
        metrics |= {f"{label}/{name}": value for name, value in _means(of).items()}
        for name, score in of.items():
            metrics[f"{label}/{name}/accuracy"] = score.counts.correct / score.counts.n
            metrics[f"{label}/{name}/length"] = score.counts.mean_length
            if score.agreement is not None and score.agreement.told:
                metrics[f"{label}/{name}/agreement"] = score.agreement.agree / score.agreement.told
    tables = _fusion(spec, settings, scores)
    normalised = {
        f"{table.model}/{table.metric}": value for table in tables if (value := _normalised(table)) is not None
    }
    metrics |= {f"{name}/normalised_score": score for name, score in normalised.items()}
    report = {
        "cells": cells,
        "confidence": settings.confidence,
        "roles": {given.label: given.role for given in _examined(spec)},
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
        "accuracy": asdict(counts.estimate("accuracy", confidence)),
        "within_budget": None if counts.within is None else asdict(counts.estimate("within", confidence)),
        "length_mean": counts.mean_length,
        "truncation_rate": counts.truncation_rate,
        "pass_k": score.pass_k,
        "grader": score.agreement and _describe_agreement(score.agreement, confidence),
    }


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
    columns = ({row.cell: getattr(row, name).value for row in table.rows} for name in ("before", "teacher", "after"))
    return normalised_score(*map(by_domain, columns))
