"""The rows that verl reads, dealt by opdctl: the embedded engine's rows, in its order, enough for every step.

One parquet file a stage, which stages with the same rows share (`converted.py`). A prompt is one message that holds the
rendered text (see `templates`); what a verifier needs travels as JSON. Nothing is drawn, cut or shuffled by verl.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from opdctl.backends.contract import Control, StageSpec
from opdctl.backends.verl.budgets import budgets
from opdctl.backends.verl.converted import convert_once
from opdctl.backends.verl.judge import pack
from opdctl.backends.verl.layout import (
    EPISODES,
    IMAGES,
    LOOP,
    ONE_TURN,
    ROUTE,
    Layout,
    has_episodes,
    has_images,
    layout,
    teacher_key,
)
from opdctl.backends.verl.render_rl import updates_of
from opdctl.engine.chat import observation_text
from opdctl.engine.checkpoint import Tokenizer, encode
from opdctl.engine.loop import open_demonstrations, open_tasks, open_vocabulary, role
from opdctl.engine.rows import Mixer, Renderer, Row, stream_seed
from opdctl.engine.teachers import Router, accepted, check_vocabularies
from opdctl.errors import StageRefused
from opdctl.records import read_json, write_json
from opdctl.settings import EffortBudget, OpdSettings, Overlong, RlvrSettings, SftSettings, Train
from opdctl.tasks import Demonstration

FORMAT = 1  # raise it when the same stage gets other rows or columns: data of an older one is written again
_GROUP_ROWS = 4096  # of a row group, the part of a file that is in memory

_Record = dict[str, Any]


def write(spec: StageSpec, control: Control) -> Layout:
    """Train and validation rows, and the plug-in's settings, in the stage's state folder; kept by later attempts.

    Raises StageRefused for a prompt or demonstration that is too long, a row without a teacher, and a model with
    another vocabulary.
    """
    files = layout(spec)
    write_json(files.settings, plugin_settings(spec))
    mark = files.train.with_name("digest.json")
    known, wanted = read_json(mark) or {}, _digest(spec)
    if known.get("digest") == wanted and files.train.is_file() and files.validation.is_file():
        return files
    mark.unlink(missing_ok=True)
    student = _Student(spec)
    others = [*role(spec, "reference"), *role(spec, "budget"), *role(spec, "teachers")]
    check_vocabularies(student.tokenizer, student.width, others, accepted=accepted(spec))
    if spec.kind != "sft":
        student.check_stops()

    def make(train: Path, validation: Path) -> None:
        batches = _demonstrations(spec, student) if spec.kind == "sft" else _prompts(spec, student, control)
        first = next(batches)
        _write_rows(train, chain([first], batches))
        # opdctl evaluates in stages of its own; verl's SFT trainer computes a loss on one whole batch at the end
        _write_rows(validation, [first])

    convert_once(spec, files, make)
    write_json(mark, {"digest": wanted})
    return files


def _digest(spec: StageSpec) -> str:
    """Of all that the rows depend on."""
    given = asdict(spec)
    keys = ("kind", "seed", "config", "tasks", "efforts", "inputs", "new_model")
    text = json.dumps([FORMAT, {key: given[key] for key in keys}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class _Student:
    """Vocabulary of the model to train."""

    def __init__(self, spec: StageSpec) -> None:
        given = role(spec, "student" if spec.kind == "opd" else "init")[0]
        self.tokenizer, self.eos_ids, self.width = open_vocabulary(spec, given)
        self.folder = given.path
        self.renderer = Renderer(self.tokenizer, self.eos_ids)

    def check_stops(self) -> None:
        """vLLM stops at the EOS ids of generation_config.json, and without one at those of config.json. Raises
        StageRefused where the model has more."""
        known = (read_json(Path(self.folder) / name) for name in ("generation_config.json", "config.json"))
        stops = next(given.get("eos_token_id") for given in known if given is not None) if self.folder else self.eos_ids
        listed = [stops] if isinstance(stops, int) else list(stops or [])
        if missing := [token for token in self.eos_ids if token not in listed]:
            raise StageRefused(
                f"{self.folder}: rollouts by vLLM would not stop at EOS {', '.join(map(str, missing))}: "
                f"generation_config.json, or config.json where there is none, names {listed or 'no EOS'}",
                hint=f'set "eos_token_id": {list(self.eos_ids)} in its generation_config.json',
            )


# ------------------------------------------------------------------------------------------------------------ rows


def _demonstrations(spec: StageSpec, student: _Student) -> Iterator[list[_Record]]:
    """Conversations of one optimizer step after another."""
    settings = SftSettings.model_validate(spec.config)
    mixer = Mixer(open_demonstrations(spec), settings.data, "train", stream_seed(spec.seed, "sft"))
    end = eos_text(student.tokenizer, student.eos_ids[0])
    size = settings.train.global_batch_size
    for step in range(settings.train.max_steps):
        shown = [demonstration for _, demonstration in mixer.demonstrations(step * size, size)]
        prompts = student.renderer.prompts([demonstration.prompt for demonstration in shown], settings.max_tokens)
        completions = student.renderer.demonstrations(shown, settings.max_tokens)
        records = []
        for demonstration, prompt, (completion, _) in zip(shown, prompts, completions, strict=True):
            _check_length(len(prompt) + len(completion), settings.max_tokens)
            written = _written(demonstration, student, settings.max_tokens, end)
            _check_end(written, completion, student.tokenizer)
            asked = {"role": "user", "content": student.renderer.text(demonstration.prompt)}
            records.append({"messages": [asked, *written]})
        yield records


def _written(demonstration: Demonstration, student: _Student, max_tokens: int, end: str) -> list[dict[str, str]]:
    """A completion as messages: verl learns those of role `assistant`, each read by itself. What an environment says is
    of role `user`."""
    if not demonstration.turns:
        return [{"role": "assistant", "content": demonstration.completion + end}]
    messages = []
    for turn in demonstration.turns:
        messages.append({"role": "assistant", "content": student.renderer.calls.render(turn.text, turn.calls) + end})
        told = observation_text(student.tokenizer, student.eos_ids, turn.observation, max_tokens)
        messages.append({"role": "user", "content": told})
    return messages[:-1]


def _check_length(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise StageRefused(
            f"a demonstration has {tokens} tokens and config.max_tokens is {limit}",
            hint="raise config.max_tokens, or drop such rows: a cut answer teaches to stop in the middle",
        )


def _check_end(written: list[dict[str, str]], completion: list[int], tokenizer: Tokenizer) -> None:
    """verl tokenizes a turn with its EOS, the engine without: some tokenizers swallow blanks before EOS."""
    texts = [message["content"] for message in written]
    found = [token for ids in tokenizer(texts, add_special_tokens=False).input_ids for token in ids]
    if found != completion:
        raise StageRefused(
            f"with EOS as text the tokenizer reads other tokens of {''.join(texts)[-80:]!r} than without",
            hint="remove blanks at the end of completions, or set rstrip and lstrip of EOS to false in "
            "tokenizer_config.json",
        )


def _prompts(spec: StageSpec, student: _Student, control: Control) -> Iterator[list[_Record]]:
    """Prompts of one rollout batch after another."""
    settings = (OpdSettings if spec.kind == "opd" else RlvrSettings).model_validate(spec.config)
    mixer = Mixer(open_tasks(spec), settings.data, "train", stream_seed(spec.seed, spec.kind))
    options, router, images, episodes = settings.rollout, _router(spec, settings), has_images(spec), has_episodes(spec)
    with _budgets(spec, control, settings, mixer, student.renderer) as estimate:
        for batch in range(rollout_batches(settings)):
            rows = mixer.rows(batch * options.prompts, options.prompts)
            student.renderer.prompts([row.prompt for row in rows], options.max_prompt_tokens)
            records = [
                _record(row, student.renderer, budget, images) for row, budget in zip(rows, estimate(rows), strict=True)
            ]
            if episodes:
                for row, record in zip(rows, records, strict=True):
                    record[LOOP] = ONE_TURN if row.environment is None else EPISODES
            if router is not None:
                for row, record in zip(rows, records, strict=True):
                    record[ROUTE] = teacher_key(router.teacher(row.prompt.columns))
            order = shuffled_batch(spec.seed, spec.kind, batch * settings.updates, len(rows))
            for position, number in enumerate(order):
                records[number]["extra_info"]["index"] = batch * options.prompts + position
            yield [records[number] for number in order]


@contextmanager
def _budgets(
    spec: StageSpec, control: Control, settings: RlvrSettings | OpdSettings, mixer: Mixer, renderer: Renderer
) -> Iterator[Callable[[list[Row]], Sequence[float | None]]]:
    if isinstance(settings, OpdSettings) or settings.effort is None:
        yield lambda rows: [None] * len(rows)
        return
    with budgets(spec, control, settings, mixer, renderer) as estimate:
        yield estimate


def rollout_batches(settings: RlvrSettings | OpdSettings) -> int:
    """Rollout batches that a stage may ask for."""
    steps = -(-settings.train.max_steps // settings.updates)
    dynamic = settings.dynamic_sampling if isinstance(settings, RlvrSettings) else None
    return steps * (dynamic.max_rounds if dynamic else 1)


def _router(spec: StageSpec, settings: RlvrSettings | OpdSettings) -> Router | None:
    if not isinstance(settings, OpdSettings):
        return None
    return Router(role(spec, "teachers"), settings.route_by, settings.default_teacher)


def shuffled_batch(seed: int, kind: str, step: int, count: int) -> list[int]:
    """How the engine shuffles a rollout batch's prompts before it splits them into optimizer steps: dealt by cell,
    each step would see one task, or one teacher, only."""
    import torch

    generator = torch.Generator().manual_seed(stream_seed(seed, f"{kind}-split", step))
    return [int(number) for number in torch.randperm(count, generator=generator)]


def _record(row: Row, renderer: Renderer, budget: float | None, images: bool) -> _Record:
    """With images, verl renders the messages by the model's own template: it alone knows an image's tokens."""
    rendered = [{"role": "user", "content": renderer.text(row.prompt)}]
    shown = {IMAGES: list(row.prompt.images)} if images else {}
    return {
        "data_source": row.task,
        "prompt": [dict(message) for message in row.prompt.messages] if images else rendered,
        **shown,
        "reward_model": {"style": "rule", "ground_truth": pack(row.prompt)},
        "extra_info": {"index": 0, "task": row.task, "budget": budget},
    }


def eos_text(tokenizer: Tokenizer, eos_id: int) -> str:
    """The text that a tokenizer reads as EOS. Raises StageRefused where there is none."""
    text = str(tokenizer.convert_ids_to_tokens(eos_id))
    if encode(tokenizer, text) != [eos_id]:
        raise StageRefused(
            f"the tokenizer does not read {text!r} as its own token {eos_id}, which ends a sequence",
            hint="declare it in tokenizer_config.json under added_tokens_decoder, as a special token",
        )
    return text


# ----------------------------------------------------------------------------------------------------------- files


def _write_rows(path: Path, batches: Iterable[list[_Record]]) -> None:
    """All batches into one file, whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{uuid4().hex}.part")  # stages of one run may write the same rows at once
    groups = _groups(batches)
    group = next(groups)
    schema = _schema(group[0])
    with parquet.ParquetWriter(staging, schema) as writer:
        for part in chain([group], groups):
            writer.write_table(pyarrow.Table.from_pylist(part, schema=schema))
    with staging.open("rb") as written:
        os.fsync(written.fileno())
    staging.replace(path)


def _groups(batches: Iterable[list[_Record]]) -> Iterator[list[_Record]]:
    group: list[_Record] = []
    for batch in batches:
        group += batch
        if len(group) >= _GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def _schema(record: _Record) -> Any:
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {
        "messages": messages,
        "prompt": messages,
        "data_source": pa.string(),
        IMAGES: pa.list_(pa.string()),
        "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
        "extra_info": pa.struct([("index", pa.int64()), ("task", pa.string()), ("budget", pa.float64())]),
        ROUTE: pa.string(),
        LOOP: pa.string(),
    }
    return pa.schema([(name, types[name]) for name in record])


# ------------------------------------------------------------------------------------------------ for the plug-in


def plugin_settings(spec: StageSpec) -> Mapping[str, Any]:
    """What the plug-in inside verl has to know, as plain data."""
    student = _Student(spec)
    found: dict[str, Any] = {
        "kind": spec.kind,
        "tasks": dict(spec.tasks),
        "efforts": spec.efforts,
        "workspace": spec.workspace,
        "eos_ids": list(student.eos_ids),
        "failure": str(layout(spec).failure),
        "schedule": _schedule(spec),
    }
    if has_episodes(spec) and spec.kind != "sft":
        found |= {"rollout": spec.config["rollout"], "chat_template": student.tokenizer.chat_template}
    if spec.kind == "rlvr":
        found |= rl_settings(spec)
    if spec.kind == "opd":
        found |= opd_settings(spec)
    return found


def _schedule(spec: StageSpec) -> dict[str, Any]:
    """For `plugin.schedule`."""
    train = Train.model_validate(spec.config["train"])
    return {
        "optimizer": train.optimizer.model_dump(mode="json"),
        "max_steps": train.max_steps,
        "updates": updates_of(spec),
    }


def rl_settings(spec: StageSpec) -> dict[str, Any]:
    settings = RlvrSettings.model_validate(spec.config)
    return {
        "reward": _reward(settings, settings.unfinished_reward, settings.overlong, settings.effort),
        "max_advantage": settings.max_advantage,
        "policy_loss": {
            "surrogate": settings.surrogate.model_dump(mode="json"),
            "mismatch": settings.mismatch.model_dump(mode="json") if settings.mismatch else None,
        },
    }


def opd_settings(spec: StageSpec) -> dict[str, Any]:
    settings = OpdSettings.model_validate(spec.config)
    form = settings.loss.model_dump(mode="json")
    return {
        "opd": {
            "form": form["form"],
            "max_advantage": form.get("max_advantage"),
            "rest": form.get("rest"),
            "surrogate": form.get("surrogate"),
            "mismatch": form.get("mismatch"),
            "weights": {teacher_key(i): given.weight for i, given in enumerate(role(spec, "teachers"))},
            "labels": {teacher_key(i): given.label for i, given in enumerate(role(spec, "teachers"))},
            "outcome_weight": form.get("outcome_weight", 0.0),
        },
        # distillation needs no rewards, but accuracy and length are reported
        "reward": _reward(settings, 0.0, Overlong(), None),
    }


def _reward(
    settings: RlvrSettings | OpdSettings, unfinished_reward: float, overlong: Overlong, effort: EffortBudget | None
) -> dict[str, Any]:
    """For `plugin.rewards`."""
    return {
        "unfinished_reward": unfinished_reward,
        "overlong": overlong.model_dump(mode="json"),
        "effort": effort.model_dump(mode="json") if effort else None,
        "max_completion_tokens": settings.rollout.max_completion_tokens,
        "max_steps": settings.train.max_steps,
        "updates": settings.updates,
    }
