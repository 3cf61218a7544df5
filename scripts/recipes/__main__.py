"""python -m scripts.recipes [RECIPE ...]: carries recipes out in one workspace, then writes docs/recipes.md.

Finished stages are reused, within a recipe and between them, so a second call takes seconds. Recipes that were carried
out before stay in the document. Exit code 1 if one failed; the others are carried out and written all the same.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

from opdctl.config import builtin_folder
from opdctl.errors import OpdctlError
from opdctl.store import Workspace
from scripts.recipes import page
from scripts.recipes.results import Results

ROOT = Path(__file__).resolve().parent.parent.parent
FIRST = "kimi_k3"  # the demo
NO_RECIPE = (
    "kimi_k3_verl_smoke",  # shows that the path of verl works; nothing of a report is measured
    "word_problems",  # a pretrained model: `make real`
)


def recipes() -> list[str]:
    """Names of the packaged pipelines that follow a report."""
    names = sorted(path.stem for path in (builtin_folder() / "pipelines").glob("*.yaml"))
    return [FIRST, *(name for name in names if name not in (FIRST, *NO_RECIPE))]


def section(workspace: Path, recipe: str) -> page.Section:
    """What came of a recipe's run."""
    module = importlib.import_module(f"scripts.recipes.{recipe}")
    run = Results(workspace, recipe)
    table = module.table(run) if hasattr(module, "table") else None
    return page.Section(recipe, module.claims(run), table, run.own_cost())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes", description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="packaged pipelines; absent: all")
    parser.add_argument("--workspace", type=Path, default=ROOT, help="where the runs are kept")
    parser.add_argument("--scale", default="laptop")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "recipes.md")
    given = parser.parse_args()
    chosen = given.recipes or recipes()
    if unknown := [name for name in chosen if name not in recipes()]:
        parser.error(f"no recipe is called {unknown[0]}; there are: {', '.join(recipes())}")
    given.workspace.mkdir(parents=True, exist_ok=True)
    failed = [recipe for recipe in chosen if not _carry_out(recipe, given.workspace, given.scale)]
    known = {run.name for run in Workspace(given.workspace).runs()}
    sections = []
    for recipe in recipes():
        if recipe in failed:
            sections.append(page.Section(recipe, failure="see the log of its stages"))
        elif recipe in known:
            try:
                sections.append(section(given.workspace, recipe))
            except (OpdctlError, ArithmeticError, LookupError, ValueError) as error:  # a claim that cannot be computed
                sections.append(page.Section(recipe, failure=f"{type(error).__name__}: {error}"))
    page.write(given.output, sections, scale=given.scale)
    print(f"{given.output} is written", f"; failed: {', '.join(failed)}" if failed else "", sep="")
    return 1 if any(part.failure for part in sections) else 0


def _carry_out(recipe: str, workspace: Path, scale: str) -> bool:
    command = [sys.executable, "-m", "opdctl", "run", recipe, f"scale={scale}", "tracking.enabled=false"]
    command += ["--run", recipe, "--workspace", str(workspace)]
    began = time.monotonic()
    done = subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode == 0
    print(f"== {recipe}: {'done' if done else 'FAILED'} after {time.monotonic() - began:.0f} s", flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
