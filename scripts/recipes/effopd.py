"""EffOPD: what stretching early updates saves, held-out prompts counted, and what an early checkpoint can become."""

import math
from collections.abc import Mapping
from typing import Any

from opdctl.engine.weights import read_weights
from scripts.recipes.claim import Claim, Table, kept, listed, lowest, percent
from scripts.recipes.results import Results, first_step

PACES = ("fast", "slow")
WINDOW = 5  # batches that a student's training accuracy is averaged over
REACHED = 0.95  # of the final score without extrapolation


def claims(run: Results) -> list[Claim]:
    report = run.report()
    final = {pace: report.gain(f"effopd[pace={pace}]", f"plain[pace={pace}]") for pace in PACES}
    return [
        *(_stretched(run, pace) for pace in PACES),
        *(_saved(run, pace) for pace in PACES),
        Claim(
            "The final score is about that of the whole distillation.",
            listed(final),
            kept(lowest(final)),
        ),
        _early(run),
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


def _stretched(run: Results, pace: str) -> Claim:
    found = run.curve(f"effopd[pace={pace}]", "extrapolation_scale")
    said = {
        "fast": "At steps 1, 2, 4, 8 ... an update stretched by 2, 4, 8 ... is often no worse on held-out prompts.",
        "slow": "The same at an eighth of the learning rate.",
    }[pace]
    kept_scales = ", ".join(f"{scale:g} at step {step}" for step, scale in found)
    return Claim(said, f"kept: {kept_scales}", max(scale for _, scale in found) > 1)


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
    step = first_step(run.curve(model, "accuracy"), bar, WINDOW)
    if step is None:
        return None
    held_out = run.curve(model, "extrapolation_prompts") if way == "effopd" else []
    batch = run.settings["stages"][model]["config"]["rollout"]["prompts"]
    return step, step * batch + sum(prompts for at, prompts in held_out if at <= step)


def _early(run: Results) -> Claim:
    report, validation = run.report(), run.report("validation")
    way = report.gain("plain[pace=slow]", "sft").value
    early, stretched = (report.gain(name, "sft").value / way for name in ("early", "stretched"))
    tried = {float(name[len("grid[stretch=") : -1]): validation.score(name) for name in validation.models}
    first, last = _update(run, "early"), _update(run, "plain[pace=slow]")
    longer, cosine = _norm(last) / _norm(first), _inner(first, last) / (_norm(first) * _norm(last))
    return Claim(
        "The direction of the update is settled early: a checkpoint of a tenth of the steps, stretched to the length "
        "of the final update, recovers about 80 % of the gain.",
        f"as it is {percent(early)} of the gain of {100 * way:.1f} points, at the stretch that validation prompts "
        f"chose {percent(stretched)}; accuracy on them "
        + ", ".join(f"{percent(score)} at {stretch:g}" for stretch, score in sorted(tried.items()))
        + f"; the final update is {longer:.1f} times as long, the cosine of the two {cosine:.2f}",
        stretched >= 0.8 if way > 0 else None,
    )


def _update(run: Results, stage: str) -> dict[str, Any]:
    """What training did to the weights of `sft`: a tensor for each name."""
    after, before = read_weights(run.checkpoint(stage)), read_weights(run.checkpoint("sft"))
    return {name: after[name].float() - before[name].float() for name in before}


def _inner(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return sum(float((one[name] * other[name]).sum()) for name in one)


def _norm(update: Mapping[str, Any]) -> float:
    return math.sqrt(_inner(update, update))
