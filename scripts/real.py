"""python -m scripts.real [--seeds 0 1 2]: a pretrained model on word problems, from download to the table of claims.

Fetches SmolLM2-135M-Instruct, carries pipelines/word_problems.yaml out once a seed, compares the models problem by
problem, and writes docs/word_problems.md. Finished stages are reused. Exit code 1 if a claim does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from opdctl.engine.scores import Estimate, mean_interval
from opdctl.settings import TASKS
from opdctl.tasks import load_task
from scripts.recipes.results import Results

ROOT = Path(__file__).resolve().parent.parent
DOMAINS = ("add_sub", "mul_div")
ALL = [*DOMAINS, *(f"{domain}_{kind}" for domain in DOMAINS for kind in ("rows", "shots"))]
MODEL = "smollm2_135m"
PUBLISHED = ROOT.parent / "shared" / "data" / "math"  # MAWPS, where it is at hand

Solved = Mapping[tuple[str, int], float]  # (domain, number of the problem) -> share of its answers that are right


@dataclass(frozen=True)
class Seed:
    """What one seed's run found."""

    strict: Solved  # the instructed base model's whole answers
    base: Solved  # by their first lines
    sft: Solved
    teacher: Solved  # each domain by its own specialist
    fused: Solved
    divergence: tuple[float, float]  # nats a token, mean of the domains: the student before, and after
    minutes: float


@dataclass(frozen=True)
class Claim:
    said: str
    found: str
    holds: bool


def solved(results: Results, stage: str, models: Mapping[str, str]) -> Solved:
    """`models`: cell of the evaluation -> the model whose answers count."""
    right: dict[tuple[str, int], list[bool]] = {}
    with (results.checkpoint(stage) / "outcomes.jsonl").open() as stream:
        for line in stream:
            outcome = json.loads(line)
            if models[outcome["cell"]] == outcome["model"]:
                key = outcome["cell"].removesuffix("_shots"), outcome["problem"]
                right.setdefault(key, []).append(outcome["correct"])
    return {key: fmean(found) for key, found in right.items()}


def first_lines(results: Results, workspace: Path) -> Solved:
    """The base model's answers, judged by their first lines: unlike one that was trained to stop, it goes on to
    further problems."""
    seed = int(results.settings["stages"]["base"]["config"]["seed"])
    right: dict[tuple[str, int], float] = {}
    for domain in DOMAINS:
        name = f"{domain}_shots"
        given = results.settings["tasks"][name]
        task = load_task(name, TASKS[given["task"]].model_validate(given), None, workspace)
        prompts = task.prompts("eval", seed, 0, task.size("eval") or 0)
        with (results.checkpoint("base") / "outcomes.jsonl").open() as stream:
            for outcome in filter(lambda outcome: outcome["cell"] == name, map(json.loads, stream)):
                said = outcome["completion"].strip().partition("\n")[0]
                right[domain, outcome["problem"]] = float(task.verify(prompts[outcome["problem"]], said).correct)
    return right


def minutes(results: Results) -> float:
    """On the clock, when they were carried out: the specialists train side by side."""
    seconds = {stage: results.record(stage).seconds for stage in results.stages}
    together = [seconds.pop(stage) for stage in results.named("specialist")]
    return (sum(seconds.values()) + max(together)) / 60


def read(workspace: Path, run: str) -> Seed:
    results = Results(workspace, run)
    report = json.loads((results.checkpoint("eval") / "report.json").read_text())
    distances = [fmean(report["divergence"][label].values()) for label in ("sft", "fused")]
    base = next(iter(json.loads((results.checkpoint("base") / "report.json").read_text())["models"]))
    return Seed(
        strict=solved(results, "base", {f"{domain}_shots": base for domain in DOMAINS}),
        base=first_lines(results, workspace),
        sft=solved(results, "eval", dict.fromkeys(DOMAINS, "sft")),
        teacher=solved(results, "eval", {domain: f"specialist[domain={domain}]" for domain in DOMAINS}),
        fused=solved(results, "eval", dict.fromkeys(DOMAINS, "fused")),
        divergence=(distances[0], distances[1]),
        minutes=minutes(results),
    )


def gain(seeds: Sequence[Seed], after: str, before: str, domains: Sequence[str] = DOMAINS) -> Estimate:
    """Mean over the problems of the paired difference, in points; each problem's is the mean over the seeds."""
    differences = [
        100 * fmean(getattr(seed, after)[key] - getattr(seed, before)[key] for seed in seeds)
        for key in seeds[0].sft
        if key[0] in domains
    ]
    return mean_interval(differences)


def accuracy(seeds: Sequence[Seed], model: str, domain: str) -> float:
    return 100 * fmean(right for seed in seeds for key, right in getattr(seed, model).items() if key[0] == domain)


def claims(seeds: Sequence[Seed]) -> list[Claim]:
    taught, reinforced = gain(seeds, "sft", "base"), gain(seeds, "teacher", "sft")
    before, after = (fmean(seed.divergence[i] for seed in seeds) for i in (0, 1))
    short = {domain: gain(seeds, "fused", "teacher", [domain]) for domain in DOMAINS}
    kept = {domain: gain(seeds, "fused", "sft", [domain]) for domain in DOMAINS}
    return [
        Claim("SFT is better than the instructed base model, first lines", shown(taught), taught.low > 0),
        Claim("GRPO improves the specialists, domains pooled", shown(reinforced), reinforced.low > 0),
        Claim(
            "OPD halves the student's divergence from its teachers",
            f"{before:.3f} to {after:.3f} nats a token",
            after <= before / 2,
        ),
        Claim(
            "the student is within 4 points of each teacher",
            "; ".join(f"{domain} {shown(value)}" for domain, value in short.items()),
            all(value.value >= -4 for value in short.values()),
        ),
        Claim(
            "no domain is lost against SFT",
            "; ".join(f"{domain} {shown(value)}" for domain, value in kept.items()),
            all(value.high >= 0 for value in kept.values()),
        ),
    ]


def shown(value: Estimate) -> str:
    return f"{value.value:+.1f} [{value.low:+.1f}, {value.high:+.1f}]"


def page(seeds: Sequence[Seed], names: Sequence[int], data: str) -> str:
    sizes = {domain: sum(key[0] == domain for key in seeds[0].sft) for domain in DOMAINS}
    lines = [
        "# SmolLM2-135M on word problems",
        "",
        f"Written by `python -m scripts.real`. Data: {data}. Seeds {', '.join(map(str, names))}, in minutes on the "
        f"clock: {', '.join(f'{seed.minutes:.0f}' for seed in seeds)}. Greedy answers to the same held-out problems; a "
        "difference is paired by problem, its interval is Student's at 95 % over the problems, each problem's "
        "difference averaged over the seeds first.",
        "",
        "| % correct | " + " | ".join(f"{domain} ({sizes[domain]} problems)" for domain in DOMAINS) + " |",
        "|---|" + "---|" * len(DOMAINS),
    ]
    rows = {
        "strict": "instructed base",
        "base": "instructed base, first line only",
        "sft": "SFT",
        "teacher": "specialist (GRPO)",
        "fused": "student (OPD)",
    }
    for model, name in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{accuracy(seeds, model, d):.1f}" for d in DOMAINS) + " |")
    lines += ["", "| claim | measured, in points | holds |", "|---|---|---|"]
    lines += [f"| {claim.said} | {claim.found} | {'yes' if claim.holds else 'no'} |" for claim in claims(seeds)]
    return "\n".join(lines) + "\n"


def carry_out(seed: int, workspace: Path, overrides: Sequence[str]) -> None:
    command = [sys.executable, "-m", "opdctl", "run", "word_problems", f"seed={seed}", *overrides]
    command += ["--run", f"word_problems-{seed}", "--workspace", str(workspace)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.real", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workspace", type=Path, default=ROOT)
    parser.add_argument("--data", type=Path, help="folder with mawps_*.jsonl; absent: generated problems alone")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "word_problems.md")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the pipeline")
    given = parser.parse_args()
    data = given.data or (PUBLISHED if PUBLISHED.is_dir() else None)
    overrides = list(given.overrides)
    if data:
        overrides += ["task=word_problems_mawps", *(f"tasks.{name}.path={data.resolve()}" for name in ALL)]
    if not (given.workspace / "models" / MODEL).exists():
        fetch = [sys.executable, "-m", "opdctl", "model", "fetch", MODEL, "--workspace", str(given.workspace)]
        subprocess.run(fetch, check=True)
    for seed in given.seeds:
        carry_out(seed, given.workspace, overrides)
    seeds = [read(given.workspace, f"word_problems-{seed}") for seed in given.seeds]
    text = page(seeds, given.seeds, "MAWPS and generated drills" if data else "generated problems")
    given.output.write_text(text)
    print(text)
    return 0 if all(claim.holds for claim in claims(seeds)) else 1


if __name__ == "__main__":
    sys.exit(main())
