"""Runs held against each other: students cell by cell, what they cost, how their training went, with intervals.

Runs, and stages with the axis `seed`, that differ in nothing but the seed are one block: means with Student's interval
over the seeds. A block of one seed has the intervals of its evaluation (Wilson, Newcombe), which know its prompts only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from opdctl.comparison.costs import Ledger
from opdctl.comparison.exams import METRICS, Exam, exams_of
from opdctl.comparison.history import Curve, curves
from opdctl.engine.scores import Estimate, by_domain, difference, mean_interval, normalised_score, weighted_sum
from opdctl.references import unseeded
from opdctl.store import RunDir, StageDir

EPISODES = ("turns", "valid_calls")  # of the health, what the report tells
HEALTH = (
    "reverse_kl",
    "overlap",
    "student_entropy",
    "teacher_entropy",
    "entropy",
    "length",
    "accuracy",
    *EPISODES,
)
ENOUGH = 0.95  # share of the final training accuracy
COSTS = {  # all_: with everything that the student was made from
    "sampled_tokens": "tokens sampled",
    "sampled_completions": "completions sampled",
    "cpu_seconds": "CPU seconds",
    "gpu_seconds": "GPU seconds",
    "peak_memory_gib": "peak memory, GiB",
    "expected_memory_gib": "expected peak memory, GiB",
    "seconds": "wall seconds, last attempt",
    "steps": "steps",
    "steps_to_95": "steps to 95 % of the final training accuracy",
    "all_sampled_tokens": "tokens sampled, ancestors included",
    "all_cpu_seconds": "CPU seconds, ancestors included",
    "all_gpu_seconds": "GPU seconds, ancestors included",
    "all_seconds": "wall seconds, ancestors included",
}


@dataclass(frozen=True)
class Value:
    """A number of one seed, or the mean over seeds; without an interval where none can be told."""

    value: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0. Seeds that agree to the last answer by chance prove nothing."""
        if self.low is None or self.high is None or self.low == self.high:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


@dataclass(frozen=True)
class Row:
    """One cell, or their plain mean. Differences are taken seed by seed."""

    cell: str
    before: Value | None
    teacher: Value | None  # of the cell's route; else the best
    teacher_label: str
    best: Value | None  # of all teachers, chosen on these very samples
    best_label: str
    after: Value
    gain: Value | None  # after - before
    delta: Value | None  # after - teacher
    delta_best: Value | None  # after - best
    recovery: Value | None  # (after - before) / (teacher - before), Nemotron 3 Ultra's recovery rate


@dataclass(frozen=True)
class Scores:
    """Of one student in one metric."""

    rows: Sequence[Row]
    mean: Row
    normalised: Value | None  # MOPD's normalised score


@dataclass(frozen=True)
class Health:
    """A training metric: means of the first and the last tenth of the steps, and the curve of each seed."""

    first: Value
    last: Value
    curves: Mapping[int, Curve]


@dataclass(frozen=True)
class Student:
    label: str  # without the seed
    kind: str  # of the stage that made it; empty for a model from outside
    scores: Mapping[str, Scores]
    length: Value  # mean completion in the evaluation, tokens
    episodes: Mapping[str, Mapping[str, float]]  # cell -> means: `turns` of an episode, `valid_calls` of tools
    cost: Mapping[str, Value | None]  # COSTS
    health: Mapping[str, Health]


@dataclass(frozen=True)
class Block:
    """Students side by side: one eval stage of one run, or of several that differ in the seed."""

    runs: Sequence[str]
    stage: str
    seeds: Sequence[int]
    confidence: float
    cells: Sequence[str]
    students: Sequence[Student]

    @property
    def name(self) -> str:
        return " ".join(self.runs)


@dataclass(frozen=True)
class Comparison:
    blocks: Sequence[Block]
    notes: Sequence[str]  # what is not comparable, and what the intervals are


def compare(runs: Sequence[RunDir]) -> Comparison:
    """Everything there is to compare; what is missing or does not fit together is said in `notes`."""
    notes: list[str] = []
    groups: list[list[Exam]] = []
    for run in runs:
        for exam in exams_of(run, notes):
            if twin := next((other for group in groups for other in group if _same(other, exam)), None):
                notes.append(
                    f"run {run.name} reuses the evaluation of run {twin.run.name}, seed {exam.seed}: shown once"
                )
                continue
            home = next((group for group in groups if _alike(group, exam)), None)
            groups.append([exam]) if home is None else home.append(exam)
    blocks = [_block(group, notes) for group in groups]
    notes += [*_unlike(groups), *map(_interval, blocks)]
    if any(_undefined(block) for block in blocks):
        notes.append("recovery, normalised score: without the seeds in which teachers scored as the student before")
    return Comparison(blocks, list(dict.fromkeys(notes)))


def _same(other: Exam, exam: Exam) -> bool:
    """One checkpoint of one pipeline: a run that has further seeds reuses it."""
    return (other.record.id, other.settings, other.stage) == (exam.record.id, exam.settings, exam.stage)


def _alike(group: Sequence[Exam], exam: Exam) -> bool:
    first = group[0]
    same = (
        first.settings == exam.settings and first.stage == exam.stage and first.report["cells"] == exam.report["cells"]
    )
    return same and exam.seed not in [other.seed for other in group]


def _unlike(groups: Sequence[Sequence[Exam]]) -> Iterator[str]:
    """Where blocks answer different questions than the first one."""
    for group in groups[1:]:
        first, other = groups[0][0], group[0]
        mine, theirs = first.report["cells"], other.report["cells"]
        named = f"run {other.run.name} ({other.stage}) and run {first.run.name} ({first.stage})"
        if set(mine) != set(theirs):
            apart = [f"only {a.run.name} has {', '.join(c for c in x if c not in y)}" for a, x, y in (
                (first, mine, theirs), (other, theirs, mine)) if set(x) - set(y)]  # fmt: skip
            yield f"{named} have different cells, so their means are not comparable: {'; '.join(apart)}"
        configs = [exam.record.identity.get("config", {}) for exam in (first, other)]
        keys = [key for key in ("rollout", "within", "seed", "data") if configs[0].get(key) != configs[1].get(key)]
        if keys:
            yield f"{named} were evaluated with different settings: config.{', config.'.join(keys)}"
        tasks = [exam.record.identity.get("tasks") for exam in (first, other)]
        if tasks[0] != tasks[1] and set(mine) & set(theirs):
            yield f"{named} were evaluated on tasks with different settings or data"


def _undefined(block: Block) -> bool:
    """Is a ratio defined in some seeds and not in others?"""
    scores = [scores for student in block.students for scores in student.scores.values()]
    ratios = [row.recovery for each in scores for row in each.rows] + [each.normalised for each in scores]
    return any(value is not None and value.seeds < len(block.seeds) for value in ratios)


def _interval(block: Block) -> str:
    """What the intervals of a block are."""
    percent = f"{block.confidence * 100:g} %"
    named = f"{block.name} ({block.stage})"
    if len(block.seeds) > 1:
        listed = ", ".join(map(str, block.seeds))
        return f"{named}: {percent} intervals are Student's over {len(block.seeds)} seeds ({listed})"
    return (
        f"{named}: one seed ({block.seeds[0]}), so {percent} intervals are binomial, over the answers of its "
        "evaluation, and say nothing about another seed"
    )


# ------------------------------------------------------------------------------------------------------ over seeds


def _over(numbers: Iterable[float | None], confidence: float, alone: Estimate | None = None) -> Value | None:
    """Mean of what seeds say; `alone` has the interval where there is only one."""
    known = [number for number in numbers if number is not None]
    if not known:
        return None
    if len(known) > 1:
        found = mean_interval(known, confidence)
        return Value(found.value, found.low, found.high, len(known))
    return Value(known[0], alone.low if alone else None, alone.high if alone else None, 1)


def _spread(estimates: Sequence[Estimate], confidence: float) -> Value:
    value = _over([estimate.value for estimate in estimates], confidence, estimates[0])
    assert value is not None
    return value


def _block(exams: Sequence[Exam], notes: list[str]) -> Block:
    first = exams[0]
    labels = list(dict.fromkeys(label for exam in exams for label in exam.students()))
    made = {label: _made(label, exams, notes) for label in labels}
    ledger = Ledger(first.run.workspace, [stage for stages in made.values() for stage in stages.values()])
    return Block(
        runs=list(dict.fromkeys(exam.run.name for exam in exams)),
        stage=first.stage,
        seeds=[exam.seed for exam in exams],
        confidence=first.report["confidence"],
        cells=first.report["cells"],
        students=[
            _student(label, [exam for exam in exams if label in exam.students()], made[label], ledger)
            for label in labels
        ],
    )


def _made(label: str, exams: Sequence[Exam], notes: list[str]) -> dict[int, StageDir]:
    """Seed -> the stage that made the student; what it cost is not known where that is gone."""
    found: dict[int, StageDir] = {}
    for exam in exams:
        stage = exam.made(exam.students()[label]) if label in exam.students() else None
        if stage is not None and stage.record() is not None:
            found[exam.seed] = stage
        elif label in exam.students():
            notes.append(
                f"run {exam.run.name}: the cost of {label} is not known, its checkpoint is not in this workspace"
            )
    return found


def _student(label: str, exams: Sequence[Exam], stages: Mapping[int, StageDir], ledger: Ledger) -> Student:
    confidence, cells = exams[0].report["confidence"], exams[0].report["cells"]
    named = [(exam, exam.students()[label]) for exam in exams]
    drawn = {seed: curves(stage) for seed, stage in stages.items()}
    kinds = {record.kind for stage in stages.values() if (record := stage.record())}
    lengths = [fmean(exam.report["models"][name][cell]["length_mean"] for cell in cells) for exam, name in named]
    length = _over(lengths, confidence)
    assert length is not None
    return Student(
        label=label,
        kind=" ".join(sorted(kinds)),
        scores={metric: _scores(named, metric) for metric in METRICS if all(exam.has(metric) for exam in exams)},
        length=length,
        episodes=_episodes([exam.report["models"][name] for exam, name in named], cells),
        cost=_cost(stages, drawn, ledger, confidence),
        health=_health(drawn, confidence),
    )


def _episodes(scored: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> dict[str, dict[str, float]]:
    played = [cell for cell in cells if all(of[cell].get("episodes") for of in scored)]
    return {cell: {name: fmean(of[cell]["episodes"][name] for of in scored) for name in EPISODES} for cell in played}


def _scores(students: Sequence[tuple[Exam, str]], metric: str) -> Scores:
    confidence, cells = students[0][0].report["confidence"], students[0][0].report["cells"]
    marks = [{cell: _Marks.of(exam, label, cell, metric) for cell in cells} for exam, label in students]
    rows = [_row(cell, [by_cell[cell] for by_cell in marks], confidence) for cell in cells]
    mean = _row("mean", [_Marks.mean(list(by_cell.values())) for by_cell in marks], confidence)
    return Scores(rows, mean, _over([_normalised(by_cell) for by_cell in marks], confidence))


@dataclass(frozen=True)
class _Marks:
    """One cell of one seed."""

    before: Estimate | None
    teacher: Estimate | None
    teacher_label: str
    best: Estimate | None
    best_label: str
    after: Estimate

    @staticmethod
    def of(exam: Exam, label: str, cell: str, metric: str) -> "_Marks":
        before = next(iter(exam.labels("before")), None)
        taught = {name: exam.estimate(name, cell, metric) for name in exam.labels("teachers")}
        best = max(taught, key=lambda name: (taught[name].value, name == exam.routes.get(cell)), default="")
        routed = exam.routes.get(cell, best)
        return _Marks(
            before=exam.estimate(before, cell, metric) if before else None,
            teacher=taught.get(routed),
            teacher_label=unseeded(routed)[0],
            best=taught.get(best),
            best_label=unseeded(best)[0],
            after=exam.estimate(label, cell, metric),
        )

    @staticmethod
    def mean(marks: Sequence["_Marks"]) -> "_Marks":
        def average(estimates: Sequence[Estimate | None]) -> Estimate | None:
            known = [estimate for estimate in estimates if estimate is not None]
            return weighted_sum([(1 / len(known), each) for each in known]) if len(known) == len(estimates) else None

        after = average([mark.after for mark in marks])
        assert after is not None
        best, teacher = average([mark.best for mark in marks]), average([mark.teacher for mark in marks])
        return _Marks(average([mark.before for mark in marks]), teacher, "", best, "", after)

    def recovery(self) -> float | None:
        if self.before is None or self.teacher is None or self.teacher.value == self.before.value:
            return None
        return (self.after.value - self.before.value) / (self.teacher.value - self.before.value)


def _row(cell: str, marks: Sequence[_Marks], confidence: float) -> Row:
    def column(read: Callable[[_Marks], Estimate | None]) -> Value | None:
        found = [value for mark in marks if (value := read(mark)) is not None]
        return _spread(found, confidence) if found else None

    def against(read: Callable[[_Marks], Estimate | None]) -> Value | None:
        found = [difference(mark.after, other) for mark in marks if (other := read(mark)) is not None]
        return _spread(found, confidence) if found else None

    def one(labels: Iterable[str]) -> str:
        distinct = set(labels)
        return distinct.pop() if len(distinct) == 1 else "differs by seed"

    return Row(
        cell=cell,
        before=column(lambda mark: mark.before),
        teacher=column(lambda mark: mark.teacher),
        teacher_label=one(mark.teacher_label for mark in marks),
        best=column(lambda mark: mark.best),
        best_label=one(mark.best_label for mark in marks),
        after=_spread([mark.after for mark in marks], confidence),
        gain=against(lambda mark: mark.before),
        delta=against(lambda mark: mark.teacher),
        delta_best=against(lambda mark: mark.best),
        recovery=_over([mark.recovery() for mark in marks], confidence),
    )


def _normalised(marks: Mapping[str, _Marks]) -> float | None:
    """A cell's task is the domain, its effort the benchmark."""
    if any(mark.before is None or mark.teacher is None for mark in marks.values()):
        return None
    names = ("before", "teacher", "after")
    columns = ({cell: getattr(mark, name).value for cell, mark in marks.items()} for name in names)
    return normalised_score(*map(by_domain, columns))


# ------------------------------------------------------------------------------------------------------ cost, health


def _cost(
    stages: Mapping[int, StageDir], drawn: Mapping[int, Mapping[str, Curve]], ledger: Ledger, confidence: float
) -> dict[str, Value | None]:
    found: dict[str, list[float | None]] = {name: [] for name in COSTS}
    for seed, stage in stages.items():
        record = stage.record()
        if record is None:
            continue
        accuracy = drawn[seed].get("accuracy")
        spent = {
            **ledger.alone(record.id),
            **ledger.with_ancestors(record.id),
            "steps": float(record.step),
            "steps_to_95": accuracy.reaches(ENOUGH) if accuracy else None,
        }
        for name in COSTS:
            found[name].append(spent[name])
    return {name: _over(values, confidence) for name, values in found.items()}


def _health(drawn: Mapping[int, Mapping[str, Curve]], confidence: float) -> dict[str, Health]:
    found: dict[str, Health] = {}
    for name in HEALTH:
        own = {seed: by_name[name] for seed, by_name in drawn.items() if name in by_name}
        first = _over([curve.first for curve in own.values()], confidence)
        last = _over([curve.last for curve in own.values()], confidence)
        if first is not None and last is not None:
            found[name] = Health(first, last, own)
    return found
