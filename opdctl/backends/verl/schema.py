"""Does verl itself take what it would be given? Asked in its own environment, once for all stages of a plan."""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opdctl.backends.contract import StageSpec
from opdctl.backends.verl import render
from opdctl.errors import ConfigError, OpdctlError
from opdctl.records import read_json, write_json

VERSION = "0.9.1"  # of verl: keys, defaults and file formats of others differ
TIMEOUT_S = 600

Question = Mapping[str, Any]  # stage, kind and arguments: an override list

_PROGRAM = """
import json, sys
try:
    import verl
except Exception as error:
    text = f"{type(error).__name__}: {error}"
    open(sys.argv[2], "w").write(json.dumps({"version": "", "failure": text}))
    sys.exit()
from opdctl.backends.verl.schema_worker import main
main(*sys.argv[1:])
"""


def check(specs: Sequence[StageSpec]) -> Mapping[str, list[str]]:
    """Stage -> every problem that verl's configuration classes find. A verdict is kept in the user's cache folder, by
    all that it depends on; the workspace is not written to.
    """
    problems: dict[str, list[str]] = {}
    asked: list[Question] = []
    for spec in specs:
        try:
            arguments = render.overrides(spec).arguments()
        except ConfigError as error:
            problems[spec.stage] = error.problems
        else:
            asked.append({"stage": spec.stage, "kind": spec.kind, "arguments": arguments})
    if asked:
        given = next(spec for spec in specs if spec.stage == asked[0]["stage"])  # all stages have one interpreter
        for stage, lines in _judged(given, asked).items():
            if lines:
                problems[stage] = lines
    return problems


def _judged(spec: StageSpec, asked: Sequence[Question]) -> Mapping[str, list[str]]:
    python = str(spec.workers["python"])
    if not os.access(python, os.X_OK):
        line = f"workers.verl.python: there is no interpreter {python}; `make verl-env` makes one, or name another"
        return {question["stage"]: [line] for question in asked}
    kept = {question["stage"]: _place(spec, question) for question in asked}
    verdicts = {
        stage: found["problems"] for stage, path in kept.items() if path and (found := read_json(path, "problems"))
    }
    if new := [question for question in asked if question["stage"] not in verdicts]:
        answer = _ask(spec, new)
        if answer["version"] != VERSION:
            text = answer.get("failure") or f"verl {answer['version']} is installed there"
            line = f"workers.verl.python: {python}: {text}; opdctl needs verl {VERSION} (`make verl-env`)"
            return {question["stage"]: [line] for question in asked}
        for stage, lines in answer["problems"].items():
            verdicts[stage] = [f"verl.{line}" for line in lines]
            if path := kept[stage]:
                _keep(path, verdicts[stage])
    return verdicts


def _ask(spec: StageSpec, asked: Sequence[Question]) -> dict[str, Any]:
    """One process of verl's interpreter for all stages."""
    with tempfile.TemporaryDirectory(prefix="opdctl-verl-") as name:
        question, answer = Path(name) / "asked.json", Path(name) / "answer.json"
        question.write_text(json.dumps({"stages": list(asked)}))
        try:
            ended = subprocess.run(
                [spec.workers["python"], "-c", _PROGRAM, str(question), str(answer)],
                cwd=name,  # a folder of the user's may hold modules of any name
                env={**os.environ, **render.environment(spec)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"version": "", "failure": str(error)}
        if not answer.exists():
            tail = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            return {"version": "", "failure": f"ended with {ended.returncode}: {tail[0]}"}
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


# ----------------------------------------------------------------------------------------------------------- cache


def _place(spec: StageSpec, question: Question) -> Path | None:
    """The file that keeps the verdict, named after all that it depends on; None where that is not known."""
    packages = Path(spec.workers["python"]).parents[1].glob("lib*/python*/site-packages/v*.dist-info")
    installed = sorted(f"{path} {path.stat().st_mtime_ns}" for path in packages)  # verl and vLLM among them
    if not any("/verl-" in line for line in installed):
        return None
    worker = Path(__file__).with_name("schema_worker.py").read_text()
    known = [installed, worker, spec.workers, question["kind"], question["arguments"]]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "opdctl" / "verl" / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()}.json"


def _keep(path: Path, problems: list[str]) -> None:
    try:
        write_json(path, {"problems": problems})
    except (OpdctlError, OSError):
        return  # asked again the next time
