"""Rethinking OPD: overlap with a compatible and an incompatible teacher, two remedies, how many tokens to compare."""

from statistics import fmean

from opdctl.engine.scores import Estimate
from scripts.recipes.claim import MARGIN, Claim, Table, above, listed, lowest, opposite, percent, points
from scripts.recipes.results import Results

ASKED, OTHER = "general.max", "general.high"  # prompts as in the compatible teacher's RL, and others
NEAR, DISTANT, RECOVERED = (
    {form: f"{name}loss={form}]" for form in ("full_vocab", "policy_gradient")}
    for name in ("student[teacher=near,", "student[teacher=distant,", "recovered[")
)
FORM = "full_vocab"  # nearest to the report's loss; the sampled token's numbers stand beside it
BATCHES = 5  # averaged at the end of a curve


def claims(run: Results) -> list[Claim]:
    return [*_signs(run), *_conditions(run), *_remedies(run), _support(run)]


def _signs(run: Results) -> list[Claim]:
    """What is seen while the student learns."""
    overlap = {form: (_ends(run, NEAR[form], "overlap"), _ends(run, DISTANT[form], "overlap")) for form in NEAR}
    gap = {form: (_ends(run, NEAR[form], "entropy_gap"), _ends(run, DISTANT[form], "entropy_gap")) for form in NEAR}
    mass = [_ends(run, NEAR[FORM], f"overlap_mass_{who}") for who in ("student", "teacher")]
    return [
        Claim(
            "Where distillation succeeds, the overlap of the top 16 tokens rises, 72 % -> 91 %; where it fails, it "
            "stays low.",
            "; ".join(
                f"{form}: compatible {_arrow(near)}, incompatible {_arrow(distant)}"
                for form, (near, distant) in overlap.items()
            ),
            all(
                near[1] > near[0] > distant[1] and near[1] - near[0] > distant[1] - distant[0]
                for near, distant in overlap.values()
            ),
        ),
        Claim(
            "The shared tokens hold 97 to 99 % of the probability of both.",
            f"{percent(mass[0][1])} of the student's, {percent(mass[1][1])} of the teacher's, where 16 of 49 tokens "
            f"are looked at; {percent(mass[0][0])} of the student's at the start already",
            min(end for _, end in mass) >= 0.97,
        ),
        Claim(
            "The gap in entropy goes to 0 in success and stays in failure.",
            "; ".join(
                f"{form}: compatible {near[0]:.3f} -> {near[1]:.3f} nats, incompatible {distant[0]:.3f} -> "
                f"{distant[1]:.3f}, {distant[1] / near[1]:.0f} times as much"
                for form, (near, distant) in gap.items()
            ),
            all(near[1] < 0.1 * near[0] and distant[1] > 10 * near[1] for near, distant in gap.values()),
        ),
    ]


def _conditions(run: Results) -> list[Claim]:
    """What decides between success and failure."""
    report = run.report()
    apart = {form: report.gain(NEAR[form], DISTANT[form], [ASKED]) for form in NEAR}
    nothing_new = report.gain("prompted[prompts=high]", "sft", [OTHER])
    return [
        Claim(
            "Patterns of thought must be compatible: an equally good teacher of another pattern teaches less.",
            f"teachers {percent(report.score('near', [ASKED]))} and {percent(report.score('distant', [ASKED]))}; the "
            "compatible one's student is ahead by " + listed(apart),
            above(lowest(apart)),
        ),
        Claim(
            "The teacher must know something new: without that nothing is gained, compatible or not.",
            f"at high effort, which its RL left out, it has {percent(report.score('near', [OTHER]))}; the student has "
            f"{percent(report.score('sft', [OTHER]))} before and {points(nothing_new)} after, with an overlap of "
            f"{percent(_ends(run, 'prompted[prompts=high]', 'overlap')[1])} (something: {100 * MARGIN:g} points)",
            opposite(above(nothing_new, MARGIN)),
        ),
    ]


def _remedies(run: Results) -> list[Claim]:
    report = run.report()
    cold = {form: report.gain(RECOVERED[form], DISTANT[form], [ASKED]) for form in RECOVERED}
    start = {form: _ends(run, RECOVERED[form], "overlap") for form in RECOVERED}
    aligned, other = "prompted[prompts=max]", "prompted[prompts=high]"
    ahead = report.gain(aligned, other)
    entropy = {name: _ends(run, name, "student_entropy")[1] for name in (aligned, "mixed")}
    return [
        Claim(
            "A cold start by SFT on its answers recovers distillation from the incompatible teacher.",
            f"{percent(report.score('cold', [ASKED]))} after the cold start alone; with it against without: "
            + "; ".join(f"{form} {points(gain)}, overlap {_arrow(start[form])}" for form, gain in cold.items()),
            above(lowest(cold)),
        ),
        Claim(
            "Prompts as in the teacher's own training teach more than others.",
            f"{points(ahead)} over both kinds of prompt: {_both(run, aligned)} from its prompts, {_both(run, other)} "
            f"from others, {_both(run, 'sft')} before",
            above(ahead),
        ),
        Claim(
            "They make the student's entropy collapse; others are mixed in to keep it.",
            f"{entropy[aligned]:.3f} nats at the end on its prompts, {entropy['mixed']:.3f} on both kinds, each on "
            f"its own prompts, so that the two do not compare; mixed, {_both(run, 'mixed')} right",
            None,
        ),
    ]


def _support(run: Results) -> Claim:
    report = run.report()
    scores = {k: report.score(f"support[k={k}]", [ASKED]) for k in (1, 4, 16)}
    lead = report.gain("support[k=4]", "support[k=1]", [ASKED])
    return Claim(
        "The top token alone does worse than the top 4: .446, .310, .772 against .473, .331, .793.",
        "; ".join(f"k = {k} {percent(score)}" for k, score in scores.items()) + f"; 4 over 1 {points(lead)}",
        above(lead),
    )


def table(run: Results) -> Table:
    report, rows = run.report(), []
    for name in report.models:
        shown = [percent(report.score(name, [cell])) for cell in (ASKED, OTHER)]
        if name.startswith(("student", "recovered", "prompted", "mixed", "support")):
            for metric in ("overlap", "entropy_gap", "reverse_kl"):
                start, end = _ends(run, name, metric)
                shown.append(f"{start:.3f} -> {end:.3f}")
        rows.append([name, *shown, *[""] * (5 - len(shown))])
    head = ["model", "max effort", "high effort", "overlap of the top 16", "entropy gap", "KL"]
    return Table("Accuracy, and the first batch and the mean of the last ones of each distillation", head, rows)


def _ends(run: Results, stage: str, metric: str) -> tuple[float, float]:
    """Values of the first batch, before anything is learnt, and means of the last ones."""
    values = [value for _, value in run.curve(stage, metric)]
    return values[0], fmean(values[-BATCHES:])


def _arrow(ends: tuple[float, float]) -> str:
    return f"{percent(ends[0])} -> {percent(ends[1])}"


def _both(run: Results, model: str) -> str:
    scores: list[Estimate] = [run.report().score(model, [cell]) for cell in (ASKED, OTHER)]
    return " and ".join(percent(score) for score in scores)
