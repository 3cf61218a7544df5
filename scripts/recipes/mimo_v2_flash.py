"""MiMo-V2-Flash: teachers of three kinds, and an outcome reward beside them."""

from scripts.recipes.claim import Claim, above, kept, lowest, percent, points
from scripts.recipes.results import Results

TEACHERS = {"general.high": "rl_teacher", "coding_agents.high": "sft_teacher", "general_agents.high": "itself"}
WITHOUT, WITH = "student[alpha=0.0]", "student[alpha=1.0]"


def claims(run: Results) -> list[Claim]:
    report = run.report()
    gain = report.gain(WITH, "sft")
    against = {cell: report.gain(WITH, teacher, [cell]) for cell, teacher in TEACHERS.items()}
    outcome = report.gain(WITHOUT, "outcome_only")
    masked = run.metric(WITH, "mismatch_fraction")
    return [
        Claim(
            "Distillation with the outcome reward lifts the SFT student: AIME25 89.3 -> 94.1, LiveCodeBench 77.5 -> "
            "83.2, SWE-bench Verified 67.8 -> 73.4.",
            f"{percent(report.score('sft'))} before, {percent(report.score(WITH))} after: {points(gain)}",
            above(gain),
        ),
        Claim(
            "The student reaches its best teacher, or passes it, in most domains; it loses to the SFT teacher in "
            "search (51.7 to 45.4).",
            "; ".join(f"against {TEACHERS[cell]} at {cell} {points(change)}" for cell, change in against.items()),
            kept(lowest(against)),
        ),
        Claim(
            "Teachers beat the outcome reward alone: AIME25 about 93.5 against 86 after 50 steps of as many samples.",
            f"{points(outcome)} over RL by the outcome alone",
            above(outcome),
        ),
        Claim(
            "Beside the teachers the outcome reward makes little difference on AIME25 (92 to 93.5 against 93.5), and "
            "some on LiveCodeBench (84 against 81 to 82).",
            f"{points(report.gain(WITH, WITHOUT))} by alpha = 1",
            None,
        ),
        Claim(
            "Tokens are weighed by the student's ratio between training and inference, and dropped outside its bounds.",
            f"{percent(masked)} of the last batches' tokens were dropped: trainer and sampler are one engine here",
            masked > 0,
        ),
    ]
