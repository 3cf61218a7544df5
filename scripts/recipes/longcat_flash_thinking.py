"""LongCat-Flash-Thinking: experts trained apart, fused in weight space, then short general RL."""

from scripts.recipes.claim import Claim, above, kept, listed, lowest, percent, points
from scripts.recipes.results import Results


def claims(run: Results) -> list[Claim]:
    report = run.report()
    experts = {f"{domain}.max": f"expert[domain={domain}]" for domain in run.settings["axes"]["domain"]}
    taught = report.teachers("sft", experts)
    fused = {cell: report.gain("fused", expert, [cell]) for cell, expert in experts.items()}
    final = {cell: report.gain("general_rl", expert, [cell]) for cell, expert in experts.items()}
    return [
        Claim(
            "RL for one domain at a time makes an expert of each.",
            f"{percent(report.score('sft'))} after SFT, {points(taught)} by the experts in their own domains",
            above(taught),
        ),
        Claim(
            "The fused model is about as good as the best expert everywhere, or better: tau2 70.3 -> 70.6, "
            "LiveCodeBench 78.0 -> 80.1, AIME24 93.6 -> 94.3, HMMT 84.8 -> 85.4.",
            "before general RL, against each domain's expert: " + listed(fused),
            kept(lowest(fused)),
        ),
        Claim(
            "Short general RL after the fusion loses nothing of the experts.",
            f"{points(report.gain('general_rl', 'fused'))} by general RL; against the experts: {listed(final)}",
            kept(lowest(final)),
        ),
        Claim(
            "Fusion needs no training: it costs nothing beside the RL that it replaces.",
            f"{run.cost('fused'):.1f} CPU seconds for the fusion, {run.cost('expert[*]'):.0f} for the experts, "
            f"{run.cost('general_rl'):.0f} for general RL",
            run.cost("fused") < 0.1 * run.cost("expert[*]"),
        ),
    ]
