"""Finished runs on disk, made up: SFT, one teacher, one student or more, and an eval stage with chosen counts."""

import json
import re
from dataclasses import asdict

from opdctl.backends.contract import Event
from opdctl.backends.events import EventWriter
from opdctl.engine.scores import CellCounts, fusion_tables, wilson_interval
from opdctl.store import Parent, Record, Workspace

CELLS = ("a.low", "a.high", "b.low")
N = 100
RIGHT = {"sft": (40, 20, 50), "teacher": (80, 60, 90), "student": (70, 60, 80)}
KINDS = {"sft": "sft", "teacher": "rlvr", "eval": "eval"}
METRICS = {  # of each stage's record
    "sft": {"loss": 0.5, "cpu_seconds": 5.0},
    "teacher": {"reward": 0.9, "cpu_seconds": 20.0, "sampled_tokens": 3000.0, "sampled_completions": 300.0},
    "student": {"reverse_kl": 0.1, "cpu_seconds": 10.0, "sampled_tokens": 1000.0, "sampled_completions": 100.0},
    "eval": {"cpu_seconds": 1.0, "sampled_tokens": 900.0},
}


def counts(correct, n=N):
    return CellCounts(n=n, correct=correct, within=max(0, correct - 10), length_sum=5 * n, truncated=0)


def report_of(right, roles, cells=CELLS, n=N):
    """As an eval stage writes it. `right`: model -> right answers in each cell; `roles`: model -> role."""
    known = {label: {cell: counts(c, n) for cell, c in zip(cells, row, strict=True)} for label, row in right.items()}
    by_role = {role: [label for label in right if roles[label] == role] for role in roles.values()}
    tables = []
    if by_role.keys() >= {"before", "teachers", "after"}:
        teachers = {label: known[label] for label in by_role["teachers"]}
        routes = dict.fromkeys(cells, by_role["teachers"][0])
        after = {label: known[label] for label in by_role["after"]}
        tables = fusion_tables(known[by_role["before"][0]], teachers, after, routes)
    return {
        "cells": list(cells),
        "confidence": 0.95,
        "roles": roles,
        "models": {label: {cell: described(c) for cell, c in by_cell.items()} for label, by_cell in known.items()},
        "fusion": [table.as_json() for table in tables],
        "normalised_score": {},
    }


def described(cell):
    within = None if cell.within is None else asdict(wilson_interval(cell.within, cell.n))
    return {
        **asdict(cell),
        "accuracy": asdict(wilson_interval(cell.correct, cell.n)),
        "within_budget": within,
        "length_mean": cell.mean_length,
        "pass_k": {"1": cell.correct / cell.n},
    }


def examined(workspace, name, *, seed=0, right=None, seeds=(), cells=CELLS, config=None, unfinished=(), metrics=None):
    """A run; with `seeds`, every stage once a seed, named as the axis names it, and `right` a function of the seed."""
    run = Workspace(workspace).run(name)
    stages = {}
    for own in seeds or [None]:
        suffix = "" if own is None else f"[seed={own}]"
        chosen = right(own) if callable(right) else right or RIGHT
        stages |= _stages(run, suffix, chosen, cells, config or {}, unfinished, metrics or {})
    run.write_pipeline({"name": "small", "seed": seed, "seeds": list(seeds), "stages": stages})
    run.write_info(name=name, pipeline="small", created="2026-01-02T03:04:05+00:00", argv=["opdctl", "run", "small"])
    return run


def _stages(run, suffix, right, cells, config, unfinished, metrics):
    students = [label for label in right if label not in ("sft", "teacher")]
    inputs = {"sft": {"init": "model:"}, "teacher": {"init": "stage:sft"}}
    inputs |= {label: {"student": "stage:sft", "teachers": ["stage:teacher"]} for label in students}
    inputs["eval"] = {"before": "stage:sft", "teachers": ["stage:teacher"], "after": [f"stage:{s}" for s in students]}
    stages, ids = {}, {}
    for base, given in inputs.items():
        kind, name, own = KINDS.get(base, "opd"), _named(base, suffix), config if base == "eval" else {}
        stages[name] = {"kind": kind, "backend": "embedded", "inputs": given, "config": own}
        if base in unfinished or not set(_read(given)) <= ids.keys() | {"model:"}:
            continue
        read = [(role, ref) for role, refs in given.items() for ref in _read({role: refs})]
        parents = [_parent(role, ref, suffix, ids) for role, ref in read]
        told = metrics.get(base, METRICS.get(base, METRICS["student"]))
        files = None
        if base == "eval":
            roles = {"sft": "before", "teacher": "teachers"} | dict.fromkeys(students, "after")
            named = {label: _named(label, suffix) for label in roles}
            by_name = {named[label]: right[label] for label in roles}
            report = report_of(by_name, {named[label]: role for label, role in roles.items()}, cells)
            files = {"report.json": json.dumps(report)}
        ids[base] = publish(run, name, kind, parents, told, config=own, files=files).id
    return stages


def _parent(role, ref, suffix, ids):
    if ref == "model:":
        return Parent(role, ref, ref)
    return Parent(role, _named(ref, suffix), f"stage:{_named(ref, suffix)}", ids[ref])


def _named(base, suffix):
    return f"{base[:-1]},{suffix[1:]}" if base.endswith("]") and suffix else base + suffix


def _read(given):
    refs = [ref for refs in given.values() for ref in (refs if isinstance(refs, list) else [refs])]
    return [ref.removeprefix("stage:") for ref in refs]


def publish(run, name, kind, parents, metrics, *, config=None, files=None, steps=20):
    """A stage with `steps` events: accuracy rises by 1 / steps a step, reverse KL falls."""
    stage = run.stage(name)
    attempt = stage.new_attempt()
    writer = EventWriter(attempt.events)
    for step in range(1, steps + 1):
        told = {"accuracy": step / steps, "reverse_kl": 1 / step, "length": 5.0, "loss": 1 / step}
        writer.write(Event(step, steps, told, "train", 1.0))
    for file, text in (files or {"model.safetensors": name}).items():
        (attempt.output / file).write_text(text)
    record = Record(
        id=re.sub(r"[^\w.-]", "-", f"id-{run.name}-{name}"),
        run=run.name,
        stage=name,
        kind=kind,
        step=steps,
        fingerprint=f"f-{run.name}-{name}",
        identity={"kind": kind, "config": config or {}, "tasks": {}},
        parents=parents,
        metrics=metrics,
        labels={},
        created="2026-01-02T03:04:05+00:00",
        opdctl_version="0",
        code="abcdef0123456789",
        argv=[],
        seconds=12.0,
    )
    return stage.publish(attempt.output, record)
