"""LongCat-2.0: three groups of experts, one student."""

from scripts.recipes.claim import Claim, above, kept, percent, points
from scripts.recipes.results import Results


def claims(run: Results) -> list[Claim]:
    report = run.report()
    experts = {cell: f"{effort}[domain={domain}]" for cell in report.cells for domain, effort in [cell.split(".")]}
    gain = report.gain("student", "sft")
    lost = {cell: report.gain("student", expert, [cell]) for cell, expert in experts.items()}
    worst = min(lost, key=lambda cell: lost[cell].value)
    return [
        Claim(
            "Experts of three groups (agent, reasoning, interaction), trained from one SFT checkpoint, become one "
            "student. No numbers are given.",
            f"{percent(report.score('sft'))} before, {percent(report.score('student'))} after: {points(gain)}; "
            f"normalised score {report.normalised('student'):.2f} of 1",
            above(gain),
        ),
        Claim(
            "The student keeps what each group knows. No numbers are given.",
            f"the largest loss against the cell's own expert is at {worst}: {points(lost[worst])}",
            kept(lost[worst]),
        ),
    ]
