"""EffOPD: what stretching early updates saves, held-out prompts counted, and what an early checkpoint can become."""

from itertools import accumulate
from statistics import fmean

from scripts.recipes.claim import Claim, Table, kept, percent, points
from scripts.recipes.results import Results

PACES = ("fast", "slow")
WINDOW = 5  # batches that a student's training accuracy is averaged over
REACHED = 0.95  # of the final score without extrapolation


def claims(run: Results) -> list[Claim]:
    report = run.report()
    stretches = {pace: _stretches(run, pace) for pace in PACES}
    final = {pace: report.gain(f"effopd[pace={pace}]", f"plain[pace={pace}]") for pace in PACES}
    way = report.gain("plain[pace=slow]", "sft").value
    early, stretched = (report.gain(name, "sft").value / way for name in ("early", "stretched"))
    return [
        Claim(
            "At steps 1, 2, 4, 8 ... the update is stretched by 2, 4, 8 ... where held-out prompts are not worse.",
            "kept: " + "; ".join(f"{pace} {_listed(stretches[pace])}" for pace in PACES),
            all(max(scale for _, scale in found) > 1 for found in stretches.values()),
        ),
        *(_saved(run, pace) for pace in PACES),
        Claim(
            "The final score is about that of the whole distillation.",
            "; ".join(f"{pace} {points(change)}" for pace, change in final.items()),
            kept(min(final.values(), key=lambda change: change.value)),
        ),
        Claim(
            "The direction of the update is settled early: a checkpoint of a tenth of the steps, stretched to the "
            "final length, recovers about 80 % of the gain.",
            f"{percent(early)} of the gain of {100 * way:.1f} points as it is, {percent(stretched)} stretched by "
            f"{_chosen(run):g}, which validation prompts chose",
            None if way <= 0 else stretched >= 0.8,
        ),
    ]


def table(run: Results) -> Table:
    report, rows = run.report(), []
    students = [f"{way}[pace={pace}]" for pace in PACES for way in ("plain", "effopd")]
    for model in ["sft", *students, "early", "stretched"]:
        row = [model, percent(report.score(model))]
        if model in students:
            way, pace = model.removesuffix("]").split("[pace=")
            reached = _reached(run, way, pace)
            steps = f"{reached[0]} of {run.record(model).step}" if reached else "never"
            row += [steps, f"{reached[1]:.0f}" if reached else "", f"{run.metric(model, 'sampled_completions'):.0f}"]
            row.append(f"{run.cost(model):.0f}")
        rows.append([*row, *[""] * (6 - len(row))])
    title = f"Accuracy at max effort, and the first step at {percent(REACHED)} of the final score without extrapolation"
    return Table(title, ["model", "accuracy", "step", "completions until then", "in all", "CPU seconds"], rows)


def _saved(run: Results, pace: str) -> Claim:
    plain, effopd = (_reached(run, way, pace) for way in ("plain", "effopd"))
    said = {
        "fast": "It comes to the same score about 3 times as soon (reviewers: about 2 times in places, and the cost of "
        "validation is left out).",
        "slow": "The same at an eighth of the learning rate.",
    }[pace]
    if plain is None or effopd is None:
        missing = "with it" if plain else "without it"
        return Claim(said, f"{percent(REACHED)} of the final score are not reached {missing}", False if plain else None)
    steps, samples = plain[0] / effopd[0], plain[1] / effopd[1]
    return Claim(
        said,
        f"{percent(REACHED)} of the final score at step {plain[0]} without, {effopd[0]} with: {steps:.1f} times as "
        f"soon; {plain[1]:.0f} and {effopd[1]:.0f} completions, held-out ones counted: {samples:.1f} times",
        samples > 1,
    )


def _reached(run: Results, way: str, pace: str) -> tuple[int, float] | None:
    """Step and completions, held-out ones counted, at which the student's training accuracy, averaged over a window of
    batches, first is at the bar; None: never."""
    model = f"{way}[pace={pace}]"
    bar = REACHED * run.report().score(f"plain[pace={pace}]").value
    curve = run.curve(model, "accuracy")
    held_out = dict(run.curve(model, "extrapolation_prompts")) if way == "effopd" else {}
    spent = list(accumulate(held_out.get(step, 0.0) for step, _ in curve))
    batch = run.settings["stages"][model]["config"]["rollout"]["prompts"]
    for end in range(WINDOW, len(curve) + 1):
        if fmean(value for _, value in curve[end - WINDOW : end]) >= bar:
            step = curve[end - 1][0]
            return step, step * batch + spent[end - 1]
    return None


def _stretches(run: Results, pace: str) -> list[tuple[int, float]]:
    return run.curve(f"effopd[pace={pace}]", "extrapolation_scale")


def _listed(found: list[tuple[int, float]]) -> str:
    return ", ".join(f"{scale:g} at step {step}" for step, scale in found)


def _chosen(run: Results) -> float:
    validation = run.report("validation")
    best = max(validation.models, key=lambda model: validation.score(model).value)
    return float(best.removesuffix("]").partition("stretch=")[2])
