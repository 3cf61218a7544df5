"""Makes workspaces of many checkpoints, and says without opdctl's code which of them have to stay."""

import dataclasses
import json
import os
import random
from pathlib import Path

from checkpoints import begin, record

from opdctl.identity import fingerprint
from opdctl.ledger import Pin
from opdctl.store import Parent, Record, Workspace

STAGES = ("sft", "max[domain=math]", "max[domain=code]", "mopd")
RULES = (
    {"keep_last": 0},
    {"keep_last": 1},
    {"keep_last": 2, "keep_every": 3},
    {"keep_last": 0, "keep_every": 2},
    {"keep_last": 0, "keep_best": {"metric": "score", "best": "highest", "count": 1}},
    {"keep_last": 0, "keep_best": {"metric": "score", "best": "lowest", "count": 2}},
)


def publish(workspace: Workspace, run: str, stage: str, parents=(), *, at: int, by_path=(), score=0.5) -> Record:
    """A checkpoint of the stage, in force from now on, the `at`-th of the workspace.

    `parents` are record ids, `by_path` records whose folders were read."""
    folder = workspace.run(run).stage(stage)
    output = folder.new_attempt().output
    (output / "model.safetensors").write_text(f"{run} {stage} {at}")
    (output / "part.bin").write_bytes(b"x" * (at + 1))
    models = [{"model": "f"} for _ in parents]
    models += [{"model": {"model.safetensors": one.files["model.safetensors"]["sha256"]}} for one in by_path]
    identity = {"seed": at, "inputs": {"init": models}}
    made = record(
        f"{at:03}-{run}-{STAGES.index(stage)}",
        fingerprint(identity),
        parents,
        run=run,
        stage=stage,
        identity=identity,
        created=f"2026-01-01T00:00:00.{at:03}",
        metrics={"score": score},
    )
    folders = [Parent("init", "a folder", f"path:{one.id}") for one in by_path]
    return folder.publish(output, dataclasses.replace(made, parents=[*made.parents, *folders]))


def declare(workspace: Workspace, run: str, rules=None) -> None:
    """The run's pipeline; `rules`: stage -> its retention, else the default of keep_last: 1."""
    stages = {name: {"kind": "sft", "retention": (rules or {}).get(name)} for name in STAGES}
    workspace.run(run).write_pipeline({"name": run, "stages": stages})


def generate(folder: Path, seed: int) -> Workspace:
    """Three runs at random: checkpoints made from one another, put back, reused, pinned, half-trained."""
    rng, workspace = random.Random(seed), Workspace(folder)
    runs, stages = ("a", "b", "c"), STAGES[: rng.randint(1, 4)]
    for run in runs:
        declare(workspace, run, {name: rng.choice(RULES) for name in STAGES})
    made: list[Record] = []
    for at in range(rng.randint(8, 22)):
        near = made[-4:] if rng.random() < 0.8 else made
        parents = [one.id for one in rng.sample(near, min(len(near), rng.choice((0, 0, 1, 1, 2))))]
        by_path = rng.sample(made, 1) if made and rng.random() < 0.1 else []
        where = rng.choice(runs), rng.choice(stages)
        made.append(publish(workspace, *where, parents, at=at, by_path=by_path, score=rng.randint(0, 5)))
    for one in made:
        if rng.random() < 0.04:  # put back, or taken over by another run
            workspace.run(rng.choice(runs)).stage(one.stage).reuse(workspace.checkpoint(one.id))
        if rng.random() < 0.02:
            workspace.ledger.pin(Pin(one.id, one.run, one.stage))
        if rng.random() < 0.02:
            begin(workspace.run(rng.choice(runs)).stage(rng.choice(STAGES)), {"seed": -1}, [one.id])
    return workspace


def must_stay(folder: Path, untouched=()) -> set[str]:
    """Record ids, by the definition: slowly, from the files. Of the runs `untouched` all."""
    runs = folder / "runs"
    records = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("**/checkpoints/*/record.json")}
    stay = {name for name, data in records.items() if data["run"] in untouched}
    stay |= {Path(os.readlink(path)).name for path in runs.rglob("checkpoint") if path.is_symlink()}
    stay |= {path.stem for path in (runs / ".pins").glob("*.json")}
    for path in runs.rglob("identity.json"):
        if (path.parent / "state").is_dir():
            stay |= set(json.loads(path.read_text())["parents"])
    for run in runs.glob("[a-z]*"):
        deleted = [json.loads(path.read_text()) for path in run.glob(".deleted/*.json")]
        for stage, settings in json.loads((run / "pipeline.yaml").read_text())["stages"].items():
            stay |= _by_rule(run.name, stage, settings["retention"] or {}, records, deleted, runs)
    while True:
        more = {parent for name in stay if name in records for parent in _parents(records[name], records)}
        if more <= stay:
            return stay & records.keys()
        stay |= more


def _by_rule(run, stage, rule, records, deleted, runs) -> set[str]:
    ours = sorted(
        (data for data in records.values() if (data["run"], data["stage"]) == (run, stage)),
        key=lambda data: data["created"],
    )
    base, _, axes = stage.removesuffix("]").partition("[")
    link = runs / run / "stages" / base / axes / "checkpoint"
    in_force = Path(os.readlink(link)).name if link.is_symlink() else ""
    stay = set()
    last = rule.get("keep_last", 1)
    stay |= {data["id"] for data in [one for one in ours if one["id"] != in_force][::-1][:last]}
    if every := rule.get("keep_every"):
        past = [data for data in deleted if data["stage"] == stage]
        ever = sorted((*ours, *past), key=lambda data: data["created"])
        stay |= {data["id"] for number, data in enumerate(ever, start=1) if number % every == 0}
    if best := rule.get("keep_best"):
        sign = -1 if best["best"] == "highest" else 1
        newest_first = reversed(ours)
        ranked = sorted(newest_first, key=lambda data: sign * data["metrics"]["score"])
        stay |= {data["id"] for data in ranked[: best["count"]]}
    return stay


def _parents(data, records) -> set[str]:
    found = set()
    for at, parent in enumerate(data["parents"]):
        if parent["record_id"]:
            found.add(parent["record_id"])
            continue
        files = data["identity"]["inputs"]["init"][at]["model"]
        for name, other in records.items():
            model = {n: listed["sha256"] for n, listed in other["files"].items() if n.endswith(".safetensors")}
            if name != data["id"] and model == files:
                found.add(name)
    return found
