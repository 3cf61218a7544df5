"""docs/recipes.md, from finished runs: nothing in it is written by hand."""

import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from opdctl.config import builtin_folder
from scripts.recipes.claim import Claim, Table

VERDICTS = {True: "yes", False: "no", None: "not decided"}
WIDTH = 118  # of lines of text
LIBRARIES = ("opdctl", "torch", "transformers", "numpy")
INTRODUCTION = """# Recipes, measured

Written by `make recipes` from the runs of the packaged pipelines at `scale={scale}`; edit nothing here by hand.

Each pipeline follows a published recipe on generated tasks with a model of 151 thousand parameters. A row says what the
report claims, what was measured here, and whether the one shows in the other: *yes*, *no*, or *not decided* where the
interval of the measurement holds both answers or the report gives nothing to compare with. A *no* says that a claim
does not show at this scale, not that the report is wrong. Rates are of prompts held out by hash. Intervals are of
95 %, over prompts: several answers to one prompt count for as much as the spread between prompts says. What comes
without an interval (costs, curves, pass@k, spreads) is judged by its value, of one seed but in the contest. What is
faithful to a report and what is not stands at the head of each pipeline file.
"""


@dataclass(frozen=True)
class Section:
    """One recipe. `failure`: why there is nothing to show."""

    pipeline: str
    claims: Sequence[Claim] = ()
    table: Table | None = None
    cpu_s: float = 0.0  # of the stages carried out for it, those of other recipes that it reuses left out
    failure: str = ""


def header(pipeline: str) -> list[str]:
    """The comment at the head of a packaged pipeline, a paragraph an item."""
    lines = (builtin_folder() / "pipelines" / f"{pipeline}.yaml").read_text().splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")]]
    paragraphs: list[str] = []
    for line in comment:
        starts = not paragraphs or not line or line.startswith(("Faithful:", "Not faithful:", "Undisclosed"))
        paragraphs += [line] if starts else []
        if not starts:
            paragraphs[-1] = f"{paragraphs[-1]} {line}".strip()
    return [paragraph for paragraph in paragraphs if paragraph]


def write(path: Path, sections: Sequence[Section], *, scale: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION.format(scale=scale), _overview(sections), *map(_section, sections), _surroundings(sections)]
    path.write_text("\n".join(parts).rstrip() + "\n")


def _overview(sections: Sequence[Section]) -> str:
    rows = []
    for section in sections:
        verdicts = [claim.holds for claim in section.claims]
        counts = ["failed"] * 3 if section.failure else [str(verdicts.count(holds)) for holds in VERDICTS]
        name = f"[{section.pipeline}](#{section.pipeline})"
        rows.append([name, header(section.pipeline)[0], *counts, _minutes(section.cpu_s)])
    return _table(["recipe", "follows", *(VERDICTS.values()), "CPU minutes"], rows)


def _section(section: Section) -> str:
    parts = [f"## {section.pipeline}", "", textwrap.fill(header(section.pipeline)[0], WIDTH), ""]
    if section.failure:
        return "\n".join([*parts, f"The run failed: {section.failure}", ""])
    rows = [[claim.said, claim.measured, VERDICTS[claim.holds]] for claim in section.claims]
    parts.append(_table(["the report says", "measured here", "shows"], rows))
    if section.table is not None:
        parts += [section.table.title + ":", "", _table(section.table.head, section.table.rows)]
    return "\n".join(parts)


def _surroundings(sections: Sequence[Section]) -> str:
    total = _minutes(sum(section.cpu_s for section in sections))
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    text = (
        f"{total} CPU minutes in the stages of all recipes, one thread a stage, on a machine of {os.cpu_count()} cores "
        f"({platform.machine()}). A stage that several recipes share is counted where it was carried out. "
        f"Python {platform.python_version()}, {versions}."
    )
    return f"## Cost and versions\n\n{textwrap.fill(text, WIDTH)}\n"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
