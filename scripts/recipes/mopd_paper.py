"""The MOPD paper: which way of fusing specialists is best, over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from opdctl.engine.scores import Estimate, mean_interval, normalised_domains
from opdctl.errors import OpdctlError
from scripts.recipes.claim import Claim, Table, above
from scripts.recipes.results import Report, Results

KEPT = "coding_agents"  # whose teacher is not trained again
PG = "mopd[loss=policy_gradient]"


@dataclass(frozen=True)
class Way:
    """A way to fuse the teachers; `stages` made it, from SFT and, where `taught`, from the teachers."""

    title: str
    model: str
    stages: tuple[str, ...]
    paper: float | None  # normalised score of its table; None: not in it
    taught: bool = True


WAYS = (
    Way("mix-RL", "mix_rl", ("mix_rl",), 0.882, taught=False),
    Way("cascade RL", "cascade_swe", ("cascade_if", "cascade_math", "cascade_swe"), 0.775, taught=False),
    Way("off-policy SFT", "off_policy", ("answers[*]", "off_policy"), 0.824),
    Way("weight average", "average", ("average",), 0.328),
    Way("task arithmetic", "arithmetic", ("grid[*]", "validation", "arithmetic"), 0.857),
    Way("MOPD, sampled token", PG, (PG,), 0.937),
    Way("MOPD, top-k", "mopd[loss=topk]", ("mopd[loss=topk]",), 0.909),
    Way("MOPD, full vocabulary", "mopd[loss=full_vocab]", ("mopd[loss=full_vocab]",), None),
)


class Contest:
    """Normalised scores, a value a seed."""

    def __init__(self, run: Results) -> None:
        self.run, self.reports = run, run.reports()

    def domains(self, model: str | Mapping[str, str]) -> list[dict[str, float]]:
        """Domain -> (s - s_SFT) / (s_teacher - s_SFT), with the teachers of round 1."""
        return [_normalised(report, model) for report in self.reports]

    def scores(self, model: str | Mapping[str, str]) -> list[float]:
        return [fmean(found.values()) for found in self.domains(model)]

    def score(self, model: str) -> Estimate:
        return mean_interval(self.scores(model))

    def lead(self, model: str, other: str) -> Estimate:
        """Of one over another, seed by seed."""
        return mean_interval([a - b for a, b in zip(self.scores(model), self.scores(other), strict=True)])

    def cost(self, stages: Sequence[str]) -> float:
        """CPU seconds a seed."""
        return sum(map(self.run.cost, stages)) / len(self.reports)

    def samples(self, stages: Sequence[str]) -> float:
        """Completions drawn to learn from, a seed."""
        records = [self.run.record(name) for stage in stages for name in self.run.named(stage)]
        drawn = [record.metrics.get("sampled_completions", 0.0) for record in records if record.kind != "eval"]
        return sum(drawn) / len(self.reports)


def claims(run: Results) -> list[Claim]:
    contest = Contest(run)
    others = [way for way in WAYS if not way.title.startswith("MOPD")]
    best = max(others, key=lambda way: contest.score(way.model).value)
    round1, round2 = contest.scores(PG), contest.scores("mopd2")
    gain = mean_interval([after - before for before, after in zip(round1, round2, strict=True)])
    return [
        _ahead(contest, "It is ahead of every other way; task arithmetic, the next, has 0.857.", best),
        *(_ahead(contest, f"It is ahead of {way.title}: {way.paper:.3f}.", way) for way in others if way != best),
        Claim(
            "The sampled token does better than the corrected top-k: 0.937 against 0.909.",
            f"{_shown(contest.score(PG))} against {_shown(contest.score('mopd[loss=topk]'))}; lead "
            f"{_shown(contest.lead(PG, 'mopd[loss=topk]'))}",
            above(contest.lead(PG, "mopd[loss=topk]")),
        ),
        Claim(
            "A second round with new teachers brings more: 0.937 -> 0.986.",
            f"{fmean(round1):.3f} -> {fmean(round2):.3f}, {_shown(gain)}",
            above(gain),
        ),
        Claim(
            "Domains fare alike: their normalised scores spread by .044 with MOPD, by .064 with mix-RL.",
            f"{_spread(contest, PG):.3f} with MOPD, {_spread(contest, 'mix_rl'):.3f} with mix-RL (standard deviations)",
            _spread(contest, PG) < _spread(contest, "mix_rl"),
        ),
    ]


def table(run: Results) -> Table:
    contest = Contest(run)
    rows = [_row(contest, way.title, way.model, way.paper, way.stages, way.taught) for way in WAYS]
    again = {task: "teacher2" for task in contest.reports[0].domains("sft") if task != KEPT}
    routed = {task: f"{again.get(task, 'teacher')}[domain={task}]" for task in contest.reports[0].domains("sft")}
    rows.append(_row(contest, "teachers of round 2", routed, 1.030, (PG, "teacher2[*]"), True))
    rows.append(_row(contest, "MOPD, round 2", "mopd2", 0.986, (PG, "teacher2[*]", "mopd2"), True))
    title = (
        f"Normalised scores (0: SFT, 1: the teachers of round 1), means of {len(contest.reports)} seeds with intervals"
    )
    head = ["way", "paper", "here", *contest.reports[0].cells, "samples", "CPU seconds", "with the teachers'"]
    return Table(title, head, rows)


def _row(
    contest: Contest,
    title: str,
    model: str | Mapping[str, str],
    paper: float | None,
    stages: Sequence[str],
    taught: bool,
) -> list[str]:
    domains, own = contest.domains(model), contest.cost(stages)
    each = [f"{fmean(found[task] for found in domains):.2f}" for task in domains[0]]
    whole = own + (contest.cost(("teacher[*]",)) if taught else 0.0)
    score = _shown(mean_interval(contest.scores(model)))
    drawn = f"{contest.samples(stages):,.0f}"
    return [title, "-" if paper is None else f"{paper:.3f}", score, *each, drawn, f"{own:.1f}", f"{whole:.1f}"]


def _ahead(contest: Contest, said: str, way: Way) -> Claim:
    lead = contest.lead(PG, way.model)
    measured = f"{_shown(contest.score(PG))} against {_shown(contest.score(way.model))} of {way.title}"
    return Claim(f"MOPD has 0.937. {said}", f"{measured}; lead {_shown(lead)}", above(lead))


def _normalised(report: Report, model: str | Mapping[str, str]) -> dict[str, float]:
    before = report.domains("sft")
    teachers = {task: f"teacher[domain={task}]" for task in before}
    found = normalised_domains(before, report.domains(teachers), report.domains(model))
    known = {task: value for task, value in found.items() if value is not None}
    if known.keys() != found.keys():
        raise OpdctlError("a teacher scores as the SFT model does, so that nothing can be normalised by it")
    return known


def _spread(contest: Contest, model: str) -> float:
    """Between the domains, mean over the seeds."""
    found = [list(domains.values()) for domains in contest.domains(model)]
    return fmean((fmean((value - fmean(values)) ** 2 for value in values)) ** 0.5 for values in found)


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
