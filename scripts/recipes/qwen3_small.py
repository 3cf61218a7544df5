"""Qwen3's small models: distillation against RL from one off-policy student, the report's table 21."""

from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Results

K = 64


def claims(run: Results) -> list[Claim]:
    report = run.report()
    costs = {stage: run.cost(stage) for stage in ("rl", "on_policy")}
    samples = {stage: run.metric(stage, "sampled_completions") for stage in costs}
    better = report.gain("on_policy", "rl")
    wider = {stage: report.pass_at(stage, K) - report.pass_at("off_policy", K) for stage in costs}
    return [
        Claim(
            "On-policy distillation of logits lifts the off-policy student: AIME24 55.0 -> 74.4.",
            f"{percent(report.score('off_policy'))} -> {percent(report.score('on_policy'))}, "
            f"{points(report.gain('on_policy', 'off_policy'))}; the teacher has {percent(report.score('flagship'))}",
            above(report.gain("on_policy", "off_policy")),
        ),
        Claim(
            "It is better than RL from the same student: AIME24 74.4 against 67.6.",
            f"{percent(report.score('on_policy'))} against {percent(report.score('rl'))}: {points(better)}",
            above(better),
        ),
        Claim(
            "It costs a tenth of RL: 1,800 against 17,920 GPU hours.",
            f"{costs['on_policy']:.1f} against {costs['rl']:.1f} CPU seconds, {samples['on_policy']:,.0f} against "
            f"{samples['rl']:,.0f} samples; the steps were set so before",
            costs["on_policy"] < costs["rl"] / 5,  # of a tenth, about: nearer to it than to half
        ),
        Claim(
            "Distillation raises pass@64: AIME24 90.0 -> 93.3.",
            f"{percent(report.pass_at('off_policy', K))} -> {percent(report.pass_at('on_policy', K))}",
            wider["on_policy"] > 0,
        ),
        Claim(
            "RL sharpens what is there and leaves pass@64 below distillation's: 90.0 against 93.3.",
            f"{percent(report.pass_at('rl', K))} against {percent(report.pass_at('on_policy', K))}; off-policy "
            f"{percent(report.pass_at('off_policy', K))}",
            wider["rl"] < wider["on_policy"],
        ),
    ]


def table(run: Results) -> Table:
    report = run.report()
    rows = []
    for name in ("off_policy", "rl", "on_policy"):
        cells = [
            f"{percent(report.score(name, [cell]))} ({percent(report.pass_at(name, K, [cell]))})"
            for cell in report.cells
        ]
        rows.append([name, *cells, "-" if name == "off_policy" else f"{run.cost(name):.1f}"])
    return Table(f"Table 21: pass@1 (pass@{K})", ["after", *report.cells, "CPU seconds"], rows)
