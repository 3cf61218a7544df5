"""UI-TARS-2: agents of one SFT checkpoint, interpolated."""

from opdctl.engine.scores import Estimate
from scripts.recipes.claim import Claim, above, kept, listed, lowest, percent, points
from scripts.recipes.results import Report, Results


def claims(run: Results) -> list[Claim]:
    report = run.report()
    agents = {f"{domain}.max": f"max[domain={domain}]" for domain in run.settings["axes"]["domain"]}
    lost = {cell: report.gain("merged", agent, [cell]) for cell, agent in agents.items()}
    elsewhere = {agent: _elsewhere(report, agent, cell) for cell, agent in agents.items()}
    best = max(elsewhere, key=lambda agent: elsewhere[agent].value)
    return [
        Claim(
            "Agents that start from one SFT checkpoint can be interpolated: the merged model is better than that "
            "checkpoint, without further training.",
            f"{percent(report.score('sft'))} before, {percent(report.score('merged'))} merged: "
            f"{points(report.gain('merged', 'sft'))}",
            above(report.gain("merged", "sft")),
        ),
        Claim(
            "The merged model keeps the strength of each agent in its own environment. The report has no table of it.",
            listed(lost) + " against its agent",
            kept(lowest(lost)),
        ),
        Claim(
            "It does well in all environments, where each agent is made for one.",
            f"merged {percent(report.score('merged'))}; over all environments the best agent "
            f"({best}) has {percent(report.score(best))}, {points(elsewhere[best])} outside its own against SFT",
            above(report.gain("merged", best)),
        ),
    ]


def _elsewhere(report: Report, agent: str, own: str) -> Estimate:
    return report.gain(agent, "sft", [cell for cell in report.cells if cell != own])
