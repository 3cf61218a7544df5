"""Evaluation statistics: intervals, pass@k, the fusion table and the normalised score. Plain Python.

Intervals treat prompts as independent. Several completions of one prompt are not: they count for as many trials as the
spread between prompts says (`CellCounts.trials`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

from opdctl.errors import OpdctlError

Metric = Literal["accuracy", "within"]


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class CellCounts:
    """What one model did in one cell (task x effort)."""

    n: int  # completions
    correct: int  # right, whatever their length
    within: int | None  # right, finished and within the budget; None: no budget was asked for
    length_sum: int  # tokens, EOS included
    truncated: int  # without EOS at the completion limit
    group_size: int = 1  # completions of a prompt
    correct_squares: int = 0  # sum over prompts of the square of how many are right; read where group_size > 1
    within_squares: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.correct <= self.n or not 0 <= (self.within or 0) <= self.correct:
            raise OpdctlError(f"impossible counts of a cell: {self}")
        if self.n % self.group_size:
            raise OpdctlError(f"{self.n} completions are not groups of {self.group_size}")

    def successes(self, metric: Metric) -> int:
        if metric == "accuracy":
            return self.correct
        if self.within is None:
            raise OpdctlError("within-budget accuracy is asked for and no budget was", hint="set config.within")
        return self.within

    def trials(self, metric: Metric) -> float:
        """Independent trials that the completions are worth: p (1 - p) / v, v the variance of the mean over prompts
        of each prompt's rate; no fewer than the prompts, no more than the completions (Kish's design effect)."""
        prompts, rate = self.n // self.group_size, self.successes(metric) / self.n
        if self.group_size == 1 or prompts == 1 or rate in (0.0, 1.0):
            return prompts
        squares = self.correct_squares if metric == "accuracy" else self.within_squares
        between = (squares / self.group_size**2 - prompts * rate**2) / (prompts - 1)
        worth = self.n if between <= 0 else rate * (1 - rate) * prompts / between
        return min(max(worth, prompts), self.n)

    def estimate(self, metric: Metric, confidence: float) -> Estimate:
        """The rate with Wilson's interval for so many `trials`."""
        trials = self.trials(metric)
        return wilson_interval(self.successes(metric) / self.n * trials, trials, confidence)

    @property
    def mean_length(self) -> float:
        return self.length_sum / self.n

    @property
    def truncation_rate(self) -> float:
        return self.truncated / self.n


def wilson_interval(successes: float, n: float, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a proportion of `n` >= 1 trials: inside [0, 1], of use at 0 and n successes too."""
    if not 0 <= successes <= n or n < 1:
        raise OpdctlError(f"{successes} successes of {n} trials are not a proportion")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / n
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # exact at the ends, where rounding would put the rate just outside its interval
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == n else (centre + spread) / scale
    return Estimate(rate, low, high)


def weighted_sum(terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Interval of sum_i weight_i * x_i of independent estimates, from their own intervals ("MOVER").

    For weights (1, -1) on Wilson intervals this is Newcombe's hybrid score interval of a difference of unpaired
    proportions (1998, method 10). Two models answering the same prompts are positively correlated, so for them it
    is on the wide side.
    """
    value = math.fsum(weight * x.value for weight, x in terms)
    below = math.fsum((weight * (x.value - (x.low if weight > 0 else x.high))) ** 2 for weight, x in terms)
    above = math.fsum((weight * (x.value - (x.high if weight > 0 else x.low))) ** 2 for weight, x in terms)
    return Estimate(value, value - math.sqrt(below), value + math.sqrt(above))


def difference(after: Estimate, before: Estimate) -> Estimate:
    """after - before of unpaired proportions, with Newcombe's interval; see `weighted_sum`."""
    return weighted_sum([(1.0, after), (-1.0, before)])


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Student's interval of the mean of n >= 2 independent draws, here seeds: m +- t_{n-1} s / sqrt(n)."""
    if len(values) < 2:
        raise OpdctlError(f"an interval over seeds needs at least two, and there are {len(values)}")
    middle = fmean(values)
    spread = student_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(middle, middle - spread, middle + spread)


def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| <= t) = confidence for `freedom` >= 1 degrees. Bisection on the angle arctan(t / sqrt(freedom))."""
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _student_within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_within(angle: float, freedom: int) -> float:
    """P(|T| <= t), t = sqrt(freedom) tan(angle): a finite sum. Source: Abramowitz and Stegun 26.7.3, 26.7.4."""
    cosine, total = math.cos(angle), 0.0
    term = cosine if freedom % 2 else 1.0
    for step in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (step - 1) / step
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of a prompt's n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k independent samples. Source: arXiv 2107.03374 eq. 1.
    """
    if not 1 <= k <= n:
        raise OpdctlError(f"pass@{k} needs at least {k} samples per prompt, and there are {n}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


# ----------------------------------------------------------------------------------------------- normalised score

Scores = Mapping[str, Mapping[str, float]]  # domain -> benchmark -> score


def by_domain(cells: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Scores of cells, TASK.EFFORT or TASK: a task is a domain, its efforts are benchmarks."""
    found: dict[str, dict[str, float]] = {}
    for cell, score in cells.items():
        task, _, effort = cell.partition(".")
        found.setdefault(task, {})[effort] = score
    return found


def normalised_domains(before: Scores, teacher: Scores, after: Scores) -> dict[str, float | None]:
    """Per domain (s - s_before) / (s_teacher - s_before), each s the plain mean of the domain's benchmarks.

    0: as before, 1: as the teachers. None where the teacher's mean is that of before, so that nothing is defined.
    """
    if before.keys() != teacher.keys() or before.keys() != after.keys():
        raise OpdctlError(f"domains differ: {sorted(before)}, {sorted(teacher)}, {sorted(after)}")
    found: dict[str, float | None] = {}
    for domain in before:
        start, top, reached = (fmean(scores[domain].values()) for scores in (before, teacher, after))
        found[domain] = None if top == start else (reached - start) / (top - start)
    return found


def normalised_score(before: Scores, teacher: Scores, after: Scores) -> float | None:
    """Mean over the domains of `normalised_domains`; None if a domain's is not defined.

    Source: MOPD paper, arXiv 2606.30406: first the mean of a domain's benchmarks, then the norm, then the mean.
    """
    domains = normalised_domains(before, teacher, after)
    known = [value for value in domains.values() if value is not None]
    return fmean(known) if known and len(known) == len(domains) else None


# --------------------------------------------------------------------------------------------------- fusion table

Cells = Mapping[str, CellCounts]  # cell, as tables show it -> counts of one model


@dataclass(frozen=True)
class FusionRow:
    """One cell. Differences have Newcombe's interval."""

    cell: str
    n: int  # completions of the student after
    before: Estimate
    teacher: Estimate  # of the teacher that the cell is routed to
    after: Estimate
    gain: Estimate  # after - before
    delta: Estimate  # after - teacher
    teacher_label: str
    best: Estimate  # of the teacher that scores highest here: chosen on these very samples, so a little too high
    best_label: str


@dataclass(frozen=True)
class FusionTable:
    """What distillation made of the teachers, cell by cell; `mean` weighs cells equally."""

    model: str  # label of the student after
    metric: Metric
    confidence: float
    rows: tuple[FusionRow, ...]
    mean: FusionRow

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fusion_table(
    before: Cells,
    teachers: Mapping[str, Cells],
    after: Cells,
    routes: Mapping[str, str],
    *,
    model: str,
    metric: Metric = "accuracy",
    confidence: float = 0.95,
) -> FusionTable:
    """Rows for the cells of `after`, in its order. `teachers`: label -> cells; `routes`: cell -> teacher's label."""
    rows = []
    for cell in after:
        missing = [cell not in before, routes.get(cell) not in teachers]
        if any(missing) or any(cell not in cells for cells in teachers.values()):
            raise OpdctlError(f"cell {cell} is not scored for the student before and every teacher, or has no teacher")
        rows.append(_row(cell, before, teachers, after, routes[cell], metric, confidence))
    if not rows:
        raise OpdctlError("a fusion table needs at least one cell")
    return FusionTable(model, metric, confidence, tuple(rows), _mean_row(rows))


def fusion_tables(
    before: Cells,
    teachers: Mapping[str, Cells],
    after: Mapping[str, Cells],
    routes: Mapping[str, str],
    *,
    confidence: float = 0.95,
) -> list[FusionTable]:
    """One table for each student in `after` (label -> cells), and a second where within-budget counts are known."""
    tables = []
    for model, cells in after.items():
        measured = [before, cells, *teachers.values()]
        budgeted = all(counts.within is not None for part in measured for counts in part.values())
        for metric in _metrics(budgeted):
            tables.append(
                fusion_table(before, teachers, cells, routes, model=model, metric=metric, confidence=confidence)
            )
    return tables


def _metrics(budgeted: bool) -> tuple[Metric, ...]:
    return ("accuracy", "within") if budgeted else ("accuracy",)


def _row(
    cell: str,
    before: Cells,
    teachers: Mapping[str, Cells],
    after: Cells,
    routed: str,
    metric: Metric,
    confidence: float,
) -> FusionRow:
    def estimate(counts: CellCounts) -> Estimate:
        return counts.estimate(metric, confidence)

    taught = {label: estimate(cells[cell]) for label, cells in teachers.items()}
    # of equals the routed one, then the first
    best = max(taught, key=lambda label: (taught[label].value, label == routed))
    start, end = estimate(before[cell]), estimate(after[cell])
    return FusionRow(
        cell=cell,
        n=after[cell].n,
        before=start,
        teacher=taught[routed],
        after=end,
        gain=difference(end, start),
        delta=difference(end, taught[routed]),
        teacher_label=routed,
        best=taught[best],
        best_label=best,
    )


def _mean_row(rows: Sequence[FusionRow]) -> FusionRow:
    def average(estimates: Sequence[Estimate]) -> Estimate:
        return weighted_sum([(1 / len(rows), estimate) for estimate in estimates])

    before = average([row.before for row in rows])
    teacher = average([row.teacher for row in rows])
    after = average([row.after for row in rows])
    return FusionRow(
        cell="mean",
        n=sum(row.n for row in rows),
        before=before,
        teacher=teacher,
        after=after,
        gain=difference(after, before),
        delta=difference(after, teacher),
        teacher_label="",
        best=average([row.best for row in rows]),
        best_label="",
    )
