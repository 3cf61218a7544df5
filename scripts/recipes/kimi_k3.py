"""Kimi K3: nine specialists by domain and effort, one student."""

from scripts.recipes.claim import Claim, above, kept, opposite, percent, points
from scripts.recipes.results import Results

EFFORTS = ("low", "high", "max")
CHOSEN = "mopd[loss=policy_gradient]"  # the report's own loss


def claims(run: Results) -> list[Claim]:
    report = run.report()
    experts = {cell: f"{effort}[domain={domain}]" for cell in report.cells for domain, effort in [cell.split(".")]}
    taught = report.teachers("sft", experts)
    lost = {cell: report.gain(CHOSEN, expert, [cell]) for cell, expert in experts.items()}
    worst = min(lost, key=lambda cell: lost[cell].value)
    lengths = {domain: [report.length(CHOSEN, f"{domain}.{e}") for e in EFFORTS] for domain in _domains(report.cells)}
    spent = [sum(column) / len(lengths) for column in zip(*lengths.values(), strict=True)]
    right = [report.score(CHOSEN, [f"{domain}.{e}" for domain in lengths]) for e in EFFORTS]
    forms = {name: report.normalised(name) for name in run.named("mopd[*]")}
    return [
        Claim(
            "Nine specialists, of three domains and three efforts, become one student. There is no table of before and "
            "after.",
            f"{percent(report.score('sft'))} before, {points(taught)} by the routed specialists, "
            f"{points(report.gain(CHOSEN, 'sft'))} by the student",
            above(report.gain(CHOSEN, "sft")),
        ),
        Claim(
            "The student keeps what the specialist of each domain and effort can.",
            f"on the mean {points(report.gain(CHOSEN, 'sft').value - taught.value)}; the largest loss is at {worst}: "
            f"{points(lost[worst])}",
            kept(lost[worst]),
        ),
        Claim(
            "A lower effort costs fewer tokens, a higher one buys accuracy.",
            "; ".join(
                f"{effort} {length:.1f} tokens, {percent(rate)}"
                for effort, length, rate in zip(EFFORTS, spent, right, strict=True)
            ),
            all(own == sorted(set(own)) for own in lengths.values())
            and [rate.value for rate in right] == sorted(rate.value for rate in right),
        ),
        Claim(
            "A top-k loss brings no clear gain over the sampled token.",
            "normalised scores: " + ", ".join(f"{name} {score:.3f}" for name, score in forms.items()),
            opposite(above(report.gain("mopd[loss=topk]", CHOSEN))),
        ),
    ]


def _domains(cells: list[str]) -> list[str]:
    return list(dict.fromkeys(cell.partition(".")[0] for cell in cells))
