"""The rows of a stage: has each a teacher, do the teachers take turns, is nothing trained on that is asked later?"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from opdctl.backends.contract import StageSpec
from opdctl.checks_inputs import STATIC_COLUMNS
from opdctl.data.check import SPOILS, text_of
from opdctl.data.near import words
from opdctl.errors import OpdctlError
from opdctl.preflight import uncovered
from opdctl.settings import (
    AnyTask,
    EffortSettings,
    FileTask,
    Mixture,
    OpdSettings,
    PublicTask,
    RlvrSettings,
    TaskSettings,
)
from opdctl.tasks import Prompt, Split, Task, load_task
from opdctl.tasks.mixer import Mixer, stream_seed
from opdctl.verdicts import Outcome, Verdict

BATCHES = 32  # rollout batches that are looked at
ALONE = 0.5  # share of optimizer steps with one teacher only, above which teachers do not take turns
MAIN = 0.9  # share of the rows: a teacher of so many is alone in most steps, however rows are dealt
ROWS = 200_000  # of a split that are looked at for overlap
CHUNK = 1024  # rows that a task is asked for at once
SAMPLED = 64  # prompts of a task and effort whose lengths are looked at
READ = 4096  # the same, of rows in memory
SHOWN = 3


def check_rows(spec: StageSpec) -> Iterator[Verdict]:
    """Of distillation: `routing`, `interleaving`; of evaluation: `overlap`. Data that cannot be read are left to those
    who read them: `opdctl validate` and the stage itself say what is wrong with them."""
    with contextlib.suppress(OpdctlError):
        if spec.kind == "opd":
            config = OpdSettings.model_validate(spec.config)
            yield from _routing(spec, config)
            yield from _interleaving(spec, config)
        elif spec.kind == "eval" and spec.config.get("data"):
            yield from _overlap(spec)


def forget() -> None:
    """Drops the rows that were read."""
    _opened.cache_clear()


@lru_cache(maxsize=8)
def _opened(name: str, plain: str, efforts: str, workspace: str) -> Task:
    """From settings as JSON: stages of one pipeline name the same tasks."""
    level = EffortSettings.model_validate_json(efforts) if efforts != "null" else None
    return load_task(name, _ANY.validate_json(plain), level, Path(workspace))


_ANY: TypeAdapter[AnyTask] = TypeAdapter(TaskSettings)


def _open(spec: StageSpec, name: str, plain: Mapping[str, Any]) -> Task:
    efforts = json.dumps(spec.efforts, sort_keys=True)
    return _opened(name, json.dumps(plain, sort_keys=True), efforts, spec.workspace)


# --------------------------------------------------------------------------------------------------------- teachers


def _routing(spec: StageSpec, config: OpdSettings) -> Iterator[Verdict]:
    tasks = {name: _open(spec, name, plain) for name, plain in spec.tasks.items()}
    routes = [given.route for given in spec.inputs if given.role == "teachers"]
    bare = uncovered(config, routes, tasks)
    values = {"uncovered": float(len(bare))}
    if bare and config.default_teacher is None:
        more = f" and {len(bare) - SHOWN} more" if len(bare) > SHOWN else ""
        remedy = "add teachers, or set config.default_teacher"
        told = f"no teacher for {'; '.join(bare[:SHOWN])}{more}"
        yield Verdict("routing", "teachers", Outcome.REFUSE, told, remedy, values)
        return
    told = f"{len(routes)} teachers, by {', '.join(config.route_by)}: every row has one"
    if bare:
        told += f"; {config.default_teacher}, the default, has {len(bare)} combinations"
    yield Verdict("routing", "teachers", Outcome.GO, told, values=values)


def _interleaving(spec: StageSpec, config: OpdSettings) -> Iterator[Verdict]:
    """With one teacher at a time a student forgets, step by step, what the others taught (verl's multi-teacher data
    come in the order of their file). opdctl shuffles rows of files and deals tasks in turn, so what is left is a batch
    too small to hold more than one teacher's rows.

    Rollout batches of more than one optimizer step are shuffled before they are split: of these the expected share of
    steps with one teacher is told, sum over teachers of share^rows.
    """
    batches = list(_dealt(spec, config))
    counts = sum(batches, Counter[str]())
    if len(counts) < 2:
        return
    shares = {label: count / counts.total() for label, count in counts.items()}
    size = config.rollout.prompts // config.updates
    if config.updates > 1:
        alone = sum(share**size for share in shares.values())
    else:
        alone = sum(len(batch) == 1 for batch in batches) / len(batches)
    values = {"alone": alone, "rows": float(size)}
    listed = ", ".join(f"{label} {share:.0%}" for label, share in sorted(shares.items())[:SHOWN])
    more = f" and {len(shares) - SHOWN} more" if len(shares) > SHOWN else ""
    told = f"{alone:.0%} of the optimizer steps have rows of one teacher only ({size} prompts a step; {listed}{more})"
    if alone > ALONE and max(shares.values()) < MAIN:
        remedy = "raise config.rollout.prompts, so that a step holds rows of several teachers"
        yield Verdict("interleaving", "teachers", Outcome.WARN, told, remedy, values)
    else:
        yield Verdict("interleaving", "teachers", Outcome.GO, told, values=values)


def _dealt(spec: StageSpec, config: OpdSettings) -> Iterator[Counter[str]]:
    """Rows of each teacher in one rollout batch after another. Rows are read where a column of a file routes them;
    elsewhere task and effort say all."""
    teachers = [given for given in spec.inputs if given.role == "teachers"]
    routes = {tuple(given.route.get(column, "") for column in config.route_by): given.label for given in teachers}
    read = any(column not in STATIC_COLUMNS for column in config.route_by)
    tasks = {name: _open(spec, name, plain) for name, plain in spec.tasks.items()} if read else {}
    mixer = Mixer(tasks, config.data, "train", stream_seed(spec.seed, "opd"))
    size = config.rollout.prompts
    for batch in range(min(BATCHES, -(-config.train.max_steps // config.updates))):
        counts: Counter[str] = Counter()
        for number, (task, effort) in enumerate(mixer.cells):
            dealt = mixer.dealt(number, batch * size, size)
            every = {"domain": task, "effort": effort or ""}
            rows: list[Mapping[str, str]] = [every] * len(dealt)
            if read:
                rows = [row.prompt.columns for row in mixer.cell_rows(number, dealt.start, len(dealt))]
            for columns in rows:
                key = tuple(columns.get(column, "") for column in config.route_by)
                counts[routes.get(key, config.default_teacher or "")] += 1
        yield counts


# ---------------------------------------------------------------------------------------------------------- lengths


def first_prompts(spec: StageSpec) -> dict[str, list[Prompt]]:
    """Task -> the prompts that the stage will ask first, at every effort: `SAMPLED` of a generator, `READ` of rows in
    memory. Of a task played in turns they begin its episodes. Tasks that cannot be read are left out."""
    tasks: dict[str, Task] = {}
    mixture = Mixture.model_validate(spec.config["data"])
    for name in spec.tasks.keys() & set(mixture.tasks):
        with contextlib.suppress(OpdctlError):
            tasks[name] = _open(spec, name, spec.tasks[name])
    split: Split = "eval" if spec.kind == "eval" else "train"
    seed = spec.config.get("seed", spec.seed) if spec.kind == "eval" else stream_seed(spec.seed, spec.kind)
    mixer = Mixer(tasks, mixture, split, seed)
    found: dict[str, list[Prompt]] = {}
    for cell, (name, _) in enumerate(mixer.cells):
        with contextlib.suppress(OpdctlError):
            if name in tasks:
                size = tasks[name].size(split)
                count = min(_wanted(spec, mixer, cell, size), SAMPLED if size is None else READ)
                found.setdefault(name, []).extend(row.prompt for row in mixer.cell_rows(cell, 0, count))
    return found


def _wanted(spec: StageSpec, mixer: Mixer, cell: int, size: int | None) -> int:
    """Rows of a cell that the stage will see; the next ones of RL with dynamic sampling are not foreseen."""
    prompts = int(spec.config["rollout"]["prompts"])
    if "train" not in spec.config:
        return prompts if size is None else size if spec.config.get("whole") else min(prompts, size)
    settings = (OpdSettings if spec.kind == "opd" else RlvrSettings).model_validate(spec.config)
    return len(mixer.dealt(cell, 0, -(-settings.train.max_steps // settings.updates) * prompts))


# ---------------------------------------------------------------------------------------------------------- overlap


def _overlap(spec: StageSpec) -> Iterator[Verdict]:
    """Prompts of an evaluation that the models before it were trained on: `spec.gate["trained"]` has the tasks of the
    stages upstream, the evaluation's own where it is absent. Refused where they are the same word for word; where only
    case or punctuation differ, and where up to 1 % of a published test set is in its training set, told."""
    asked = _texts(spec, {name: spec.tasks[name] for name in spec.config["data"]["tasks"]}, "eval")
    trained = _texts(spec, spec.gate.get("trained", spec.tasks), "train")
    if not asked or not trained:
        return
    exact = {text: name for name, texts in trained.items() for text in texts}
    nearly = {_plain(text): name for text, name in exact.items()}
    for name, texts in asked.items():
        same = [text for text in texts if text in exact]
        alike = [text for text in texts if _plain(text) in nearly]
        values = {"prompts": float(len(texts)), "exact": float(len(same)), "nearly": float(len(alike))}
        if not alike:
            told = f"none of {len(texts):,} held-out prompts is trained on"
            yield Verdict("overlap", f"task {name}", Outcome.GO, told, values=values)
            continue
        owners = ", ".join(sorted({nearly[_plain(text)] for text in alike}))
        first = (same or alike)[0]
        told = (
            f"{len(alike):,} of {len(texts):,} held-out prompts are trained on as rows of {owners}, {len(same):,} word "
            f"for word: {first[:60]!r}"
        )
        ours = spec.tasks[name].get("task", "file") == "file"
        spoilt = bool(same) if ours else len(same) > SPOILS * len(texts)
        remedy = f"take them out of the rows of {owners}: opdctl data check --task {name} finds near ones too"
        yield Verdict("overlap", f"task {name}", Outcome.REFUSE if spoilt else Outcome.WARN, told, remedy, values)


def _texts(spec: StageSpec, tasks: Mapping[str, Mapping[str, Any]], split: Split) -> dict[str, list[str]]:
    """Task -> its prompts, runs of blanks as one. Generated tasks hold out by content, and need no look."""
    found: dict[str, list[str]] = {}
    for name, plain in tasks.items():
        if not isinstance(_ANY.validate_python(plain), FileTask | PublicTask):
            continue
        with contextlib.suppress(OpdctlError):  # some published data are a test and nothing else
            found[name] = list(_prompts(_open(spec, name, plain), split))
    return {name: texts for name, texts in found.items() if texts}


def _prompts(task: Task, split: Split) -> Iterable[str]:
    total = min(task.size(split) or 0, ROWS)
    for start in range(0, total, CHUNK):
        for prompt in task.prompts(split, 0, start, min(CHUNK, total - start)):
            yield " ".join([*text_of(prompt).split(), *prompt.images])


def _plain(text: str) -> str:
    return " ".join(words(text))
