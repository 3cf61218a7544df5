"""Evaluation: every model on every cell (task x effort) of held-out prompts, and the fusion table."""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec, Stopped
from opdctl.engine.advantages import over_budget
from opdctl.engine.batch import Sequence
from opdctl.engine.distance import Asked, check_comparable, divergences
from opdctl.engine.effort import BudgetEstimator
from opdctl.engine.episodes import totals
from opdctl.engine.eval_report import CellScore, cell_name, examined, means, report_of, routes
from opdctl.engine.grader import Agreement, Graded, open_grader
from opdctl.engine.harness import Harness
from opdctl.engine.journal import PhaseLog, open_journal, sampler
from opdctl.engine.loop import Metrics, completions_per_call, open_policy, open_tasks, open_vocabulary, role
from opdctl.engine.recovery import damaged, write_text, write_whole
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import Completions, Generate, merged
from opdctl.engine.scores import (
    CellCounts,
    pass_at_k,
)
from opdctl.errors import StageRefused
from opdctl.settings import EvalSettings, HarnessSettings, Rollout
from opdctl.tasks.floor import constant_floor

TELL_S = 1.0  # between two events about the same model


@dataclass(frozen=True)
class Candidate:
    """A model under examination."""

    generate: Generate[Completions]
    renderer: Renderer
    batch: int | None  # completions drawn in one call; None: all of a model's, the engine makes its own batches
    journal: PhaseLog | None = None  # of its calls


Opener = Callable[[InputSpec], AbstractContextManager[Candidate]]


def run(spec: StageSpec, control: Control, opener: Opener | None = None) -> StageResult:
    """Score each input model; publish `report.json`, and `outcomes.jsonl`: what became of every completion. Scored
    models are kept in the state folder across attempts.

    `opener` opens a model for as long as it is asked; absent: in this process. One is open at a time. With `harness`
    another program examines the models.
    """
    if spec.config.get("harness") == "lm_eval":
        harness = Harness(spec)
        report, metrics = _examine(spec, control, harness.settings, harness)
        report["harness"] = harness.about()
    else:
        settings = EvalSettings.model_validate(spec.config)
        if settings.divergence:
            check_comparable(spec)
        opener = opener or in_this_process(spec, settings.rollout, settings.precision)
        examiner = _Examiner(spec, settings, opener, control)
        report, metrics = _examine(spec, control, settings, examiner)
        report["floor"] = examiner.floor()
        if settings.divergence:
            report["divergence"] = examiner.divergence(control)
            metrics |= {
                f"{label}/{cell}/divergence": nats
                for label, of in report["divergence"].items()
                for cell, nats in of.items()
            }
    write_whole(Path(spec.output) / "report.json", report)
    return StageResult(step=len(examined(spec)), metrics=metrics)


def _examine(
    spec: StageSpec, control: Control, settings: EvalSettings | HarnessSettings, examiner: "_Examiner | Harness"
) -> tuple[dict[str, Any], Metrics]:
    models = examined(spec)
    scores: dict[str, dict[str, CellScore]] = {}
    for number, model in enumerate(models):
        kept = _kept(spec, "scored", model)
        if kept.exists():
            scores[model.label] = _read(kept)
        else:
            if control.stop_requested():
                raise Stopped
            scores[model.label], outcomes = examiner.score(model)
            write_text(_kept(spec, "outcomes", model), "".join(f"{json.dumps(line)}\n" for line in outcomes))
            write_whole(kept, [[name, asdict(score)] for name, score in scores[model.label].items()])  # in order
        control.emit(number + 1, len(models), means(scores[model.label]), phase=model.label)
    with (Path(spec.output) / "outcomes.jsonl").open("wb") as stream:
        for model in models:
            stream.write(_kept(spec, "outcomes", model).read_bytes())
    return report_of(spec, settings, scores)


def in_this_process(spec: StageSpec, rollout: Rollout, precision: str = "float32") -> Opener:
    """Opens models in the embedded engine."""
    batch, journal = completions_per_call(spec, rollout), open_journal(spec)

    @contextmanager
    def opened(given: InputSpec) -> Iterator[Candidate]:
        policy, tokenizer = open_policy(spec, given, precision)
        policy.requires_grad_(False)
        if journal is not None:
            journal.begin(f"model-{zlib.crc32(given.label.encode()):08x}", alone=True)
        generate = sampler(policy, journal, given.source or given.path)
        yield Candidate(generate, Renderer(tokenizer, policy.eos_ids), batch, journal)

    return opened


class Progress:
    """Tells how many of a model's completions there are. The step stays the number of models scored."""

    def __init__(self, spec: StageSpec, control: Control, label: str) -> None:
        labels = [model.label for model in examined(spec)]
        self.control, self.label, self.models = control, label, len(labels)
        self.scored = labels.index(label) if label in labels else 0  # a budget model comes first
        self.told = time.monotonic()

    def tell(self, done: int, wanted: int) -> None:
        if time.monotonic() - self.told > TELL_S:
            self.told = time.monotonic()
            self.control.emit(self.scored, self.models, {}, phase=f"{self.label} {done}/{wanted}")


class _Examiner:
    """Asks models the held-out prompts. Every model and every effort gets the same problems and random numbers."""

    def __init__(self, spec: StageSpec, settings: EvalSettings, opener: Opener, control: Control) -> None:
        self.spec, self.settings, self.opener, self.control = spec, settings, opener, control
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "eval", settings.seed)
        self.cells = [cell_name(task, effort) for task, effort in self.mixer.cells]

    def score(self, model: InputSpec) -> tuple[dict[str, CellScore], list[dict[str, Any]]]:
        """The scores of each cell, and the outcomes of all completions."""
        budgets = self.budgets  # before the model is opened: they may take another one
        with self.opener(model) as candidate:
            drawn = self._answers(candidate, Progress(self.spec, self.control, model.label))
            texts = candidate.renderer.texts(drawn.completions)
            graded = self._graded(candidate, texts)
        episodes = drawn.episodes or [None] * len(texts)
        scores: dict[str, CellScore] = {}
        outcomes: list[dict[str, Any]] = []
        for cell, name in enumerate(self.cells):
            own = self._own(cell)
            lengths, finished = drawn.counted[own], drawn.finished[own]
            b0 = budgets[cell] if budgets else None
            group = self.settings.rollout.group_size
            verdicts = judge(self.tasks, self.rows[cell], texts[own], group, episodes[own])
            correct = [verdict.correct and done for verdict, done in zip(verdicts, finished, strict=True)]
            score = self._count(cell, correct, lengths, finished, b0, graded.get(cell))
            played = [episode.counts for episode in episodes[own] if episode is not None]
            scores[name] = replace(score, episodes=totals(played) if played else None)
            outcomes += self._outcomes(model, cell, correct, lengths, texts[own])
        if self.settings.divergence and model.role == "before":
            learned = drawn.learned or [None] * len(texts)
            write_whole(_kept(self.spec, "written", model), list(zip(drawn.completions, learned, strict=True)))
        return scores, outcomes

    def _outcomes(
        self, model: InputSpec, cell: int, correct: list[bool], lengths: list[int], texts: list[str]
    ) -> list[dict[str, Any]]:
        """One a completion; problem i is the same one in every model's outcomes of a cell."""
        size = self.settings.rollout.group_size
        return [
            {
                "model": model.label,
                "cell": self.cells[cell],
                "problem": i // size,
                "sample": i % size,
                "correct": right,
                "tokens": length,
                "completion": text,
            }
            for i, (right, length, text) in enumerate(zip(correct, lengths, texts, strict=True))
        ]

    def divergence(self, control: Control) -> dict[str, dict[str, float]]:
        """See `distance.divergences`; of the student before and after, on what the one before wrote."""
        before, teachers, after = (role(self.spec, name) for name in ("before", "teachers", "after"))
        written = iter(json.loads(_kept(self.spec, "written", before[0]).read_text()))
        numbers = routes(self.settings, teachers)
        renderer = Renderer(*open_vocabulary(self.spec, before[0])[:2])
        group, limit = self.settings.rollout.group_size, self.settings.rollout.max_prompt_tokens
        asked = [
            Asked(
                name,
                teachers[numbers[name]],
                [
                    Sequence(tuple(prompt), tuple(ids), learned=learned and tuple(learned))
                    for prompt in renderer.prompts([row.prompt for row in rows], limit)
                    for ids, learned in islice(written, group)
                ],
            )
            for name, rows in zip(self.cells, self.rows, strict=True)
        ]
        return divergences(self.spec, control, [before[0], *after], asked, self.settings.precision)

    def _graded(self, candidate: Candidate, texts: list[str]) -> dict[int, Graded]:
        """What the settings' grader makes of the completions, by the cell; only of its tasks."""
        if self.settings.grader is None:
            return {}
        grader = open_grader(self.spec, self.settings.grader, self.tasks, candidate.generate, candidate.renderer)
        group = self.settings.rollout.group_size
        return {
            cell: grader.grade(self.rows[cell], texts[self._own(cell)], group)
            for cell, (task, _) in enumerate(self.mixer.cells)
            if task in self.settings.grader.tasks
        }

    @cached_property
    def rows(self) -> list[list[Row]]:
        """Of each cell: equally many, or all of its task."""
        wanted = self.settings.rollout.prompts
        for task in self.settings.data.tasks:
            size = self.tasks[task].size("eval")
            if size is not None and size < wanted and not self.settings.whole:
                raise StageRefused(
                    f"task {task} has {size} held-out rows and config.rollout.prompts asks for {wanted}",
                    hint="lower config.rollout.prompts of the eval stage, or hold out more rows",
                )
        sizes = [self.tasks[task].size("eval") if self.settings.whole else wanted for task, _ in self.mixer.cells]
        return [self.mixer.cell_rows(cell, 0, wanted if size is None else size) for cell, size in enumerate(sizes)]

    def floor(self) -> dict[str, float]:
        """Of each cell, what a model would score that answers everything alike."""
        return {
            name: constant_floor(self.tasks[task], [row.prompt for row in rows])
            for name, (task, _), rows in zip(self.cells, self.mixer.cells, self.rows, strict=True)
        }

    def _own(self, cell: int) -> slice:
        """Where a cell's completions are among all."""
        group = self.settings.rollout.group_size
        start = sum(len(rows) for rows in self.rows[:cell]) * group
        return slice(start, start + len(self.rows[cell]) * group)

    @cached_property
    def budgets(self) -> list[list[float]] | None:
        """b0 of each cell's rows, by the cold-start model's own answers; kept in the state folder across attempts."""
        if self.settings.within is None:
            return None
        kept = Path(self.spec.state) / "budgets.json"
        if not kept.exists():
            given = (role(self.spec, "budget") or role(self.spec, "before") or examined(self.spec))[0]
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

    def _answers(self, candidate: Candidate, progress: Progress) -> Completions:
        """Completions of all cells one after another, prompt-major. Raises Stopped between two calls."""
        size, options = self.settings.rollout.group_size, self.settings.rollout
        if candidate.batch is None:
            calls = [[row for rows in self.rows for row in rows]]
        else:
            step = max(1, candidate.batch // size)
            calls = [rows[at : at + step] for rows in self.rows for at in range(0, len(rows), step)]
        seed = stream_seed(self.settings.seed, "eval-sample")
        drawn: list[Completions] = []
        wanted, done = sum(map(len, calls)) * size, 0
        for rows in calls:
            if self.control.stop_requested():
                raise Stopped
            drawn.append(roll(candidate.generate, candidate.renderer, rows, options, seed=seed, group_size=size)[1])
            done += len(rows) * size
            progress.tell(done, wanted)
        return merged(drawn, [number for number, call in enumerate(drawn) for _ in call.completions])

    def _count(
        self,
        cell: int,
        correct: list[bool],
        lengths: list[int],
        finished: list[bool],
        b0: list[float] | None,
        graded: Graded | None,
    ) -> CellScore:
        size, (_, effort) = self.settings.rollout.group_size, self.mixer.cells[cell]
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


def _kept(spec: StageSpec, what: str, model: InputSpec) -> Path:
    """A file of a model in the state folder. Labels are no part of a stage's identity: an attempt may exchange them."""
    suffix = "jsonl" if what == "outcomes" else "json"
    return Path(spec.state) / f"{what}-{zlib.crc32(f'{model.label} {model.source}'.encode()):08x}.{suffix}"


def _by_prompt(right: Items[bool], size: int) -> list[int]:
    """How many of each prompt's completions are right."""
    return [sum(right[at : at + size]) for at in range(0, len(right), size)]


def _read(path: Path) -> dict[str, CellScore]:
    try:
        return {name: _score(**stored) for name, stored in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise damaged(path, error) from error


def _score(
    counts: dict[str, Any],
    pass_k: dict[str, float],
    agreement: dict[str, Any] | None,
    episodes: dict[str, float] | None = None,
) -> CellScore:
    return CellScore(CellCounts(**counts), pass_k, Agreement(**agreement) if agreement else None, episodes)
