"""Hunyuan-MT: is a fused answer better than each of the candidates that it was made of?"""

from collections.abc import Sequence

from opdctl.engine.scores import Estimate, difference, weighted_sum, wilson_interval
from opdctl.settings import EffortSettings, FuseTask
from opdctl.tasks.fuse import FuseStream
from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Results

PROMPTS = 1000  # whose candidates are counted; a task's candidates belong to no model


def claims(run: Results) -> list[Claim]:
    report, alone = run.report("eval"), run.report("eval_alone")
    best, some = _candidates(run, _fusing(run))
    fused = report.score("fusion")
    gain = difference(fused, best)
    taught = report.gain("fusion", "form")
    return [
        Claim(
            "A model trained by RL to fuse six candidates beats its best candidate (XCOMET on WMT24pp .8585 to .8787).",
            f"{percent(fused)}, and the best single candidate is right in {percent(best)}: {points(gain)}; some "
            f"candidate is right in {percent(some)}",
            above(gain),
        ),
        Claim(
            "It is RL that teaches it: SFT gives the form alone.",
            f"after SFT {percent(report.score('form'))}, RL adds {points(taught)}",
            above(taught),
        ),
        Claim(
            "Candidates help (no comparison in the report with RL without any).",
            f"as much RL without candidates: {percent(alone.score('sft'))} to {percent(alone.score('alone'))}, with "
            f"them {percent(report.score('form'))} to {percent(fused)}",
            None,
        ),
    ]


def table(run: Results) -> Table:
    report = run.report("eval")
    rows = []
    for name in _fusing(run):
        cell, (best, some) = f"{name}.max", _candidates(run, [name])
        scores = best, some, report.score("form", [cell]), report.score("fusion", [cell])
        rows.append([name, *map(percent, scores)])
    return Table(
        "Accuracy of candidates and of fused answers", ["task", "best candidate", "any candidate", "SFT", "RL"], rows
    )


def _fusing(run: Results) -> list[str]:
    named: list[str] = run.settings["stages"]["eval"]["config"]["data"]["tasks"]
    return named


def _candidates(run: Results, names: Sequence[str]) -> tuple[Estimate, Estimate]:
    """How often a right answer stands at the best of the candidates' places, and how often at any; over the tasks."""
    best, some = [], []
    for name in names:
        settings = FuseTask.model_validate(run.settings["tasks"][name])
        task = FuseStream(name, settings, EffortSettings.model_validate(run.settings["efforts"]))
        prompts = task.prompts("eval", 0, 0, PROMPTS, "max")
        right = [[task.verify(prompt, shown).correct for shown in task.shown(prompt)] for prompt in prompts]
        best.append(max(sum(place) for place in zip(*right, strict=True)))
        some.append(sum(map(any, right)))
    return _mean(best), _mean(some)


def _mean(counts: Sequence[int]) -> Estimate:
    return weighted_sum([(1 / len(counts), wilson_interval(count, PROMPTS)) for count in counts])
