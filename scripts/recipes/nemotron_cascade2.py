"""Nemotron-Cascade 2: distillation from the run's own strongest checkpoints in the middle of a cascade."""

import json

from opdctl.records import SELECTION
from scripts.recipes.claim import Claim, above, kept, listed, lowest, percent, points
from scripts.recipes.results import Results


def claims(run: Results) -> list[Claim]:
    report = run.report()
    teachers = {f"{domain}.max": f"strongest[domain={domain}]" for domain in run.settings["axes"]["domain"]}
    mended, instead = report.gain("mopd", "multi_rl"), report.gain("mopd", "rl_instead")
    against = {cell: report.gain("mopd", teacher, [cell]) for cell, teacher in teachers.items()}
    forgotten = report.gain("if_rl", "sft", ["general.max", "coding_agents.max"])
    code = ["coding_agents.max"]
    return [
        Claim(
            "RL of one domain costs others, which distillation then mends.",
            f"{points(forgotten)} in the two other domains by IF-RL; {points(mended)} over all domains by distillation",
            above(mended),
        ),
        Claim(
            "Teachers are checkpoints of the run itself, not one for all domains: the SFT model for mathematics, later "
            "ones for the rest.",
            "; ".join(f"{cell}: {_winner(run, stage)}" for cell, stage in teachers.items()),
            len({_winner(run, stage) for stage in teachers.values()}) > 1,
        ),
        Claim(
            "Distillation beats RL from the same checkpoint: AIME25 92.0 within 30 steps, against 91.0 after 25 steps "
            "of GRPO, from 89.9.",
            f"{percent(report.score('multi_rl'))} before, {percent(report.score('mopd'))} by distillation "
            f"({run.metric('mopd', 'sampled_completions'):,.0f} samples), {percent(report.score('rl_instead'))} by RL "
            f"({run.metric('rl_instead', 'sampled_completions'):,.0f}): {points(instead)}",
            above(instead),
        ),
        Claim(
            "It recovers the teachers' level.",
            listed(against),
            kept(lowest(against)),
        ),
        Claim(
            "Code RL afterwards adds to its domain.",
            f"{points(report.gain('code_rl', 'mopd', code))} in its domain, "
            f"{points(report.gain('code_rl', 'mopd'))} over all",
            above(report.gain("code_rl", "mopd", code)),
        ),
    ]


def _winner(run: Results, stage: str) -> str:
    chosen: str = json.loads((run.checkpoint(stage) / SELECTION).read_text())["winner"]
    return chosen
