"""Sampling: a model's answers to training prompts, judged and published as demonstrations for SFT stages.

Rejection sampling: of `group_size` tries a prompt, the first `per_prompt` that the verifier accepts.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opdctl.backends.contract import Control, StageResult, StageSpec, Stopped
from opdctl.engine.eval import Candidate, Opener, in_this_process
from opdctl.engine.eval_report import cell_name
from opdctl.engine.loop import Metrics, open_tasks, role
from opdctl.engine.recovery import damaged, write_whole
from opdctl.engine.rows import Mixer, Row, judge, roll, stream_seed
from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import SampleSettings
from opdctl.tasks.sampled import DATA, Sampled


@dataclass(frozen=True)
class CellTally:
    """What came of the prompts of one cell (task x effort)."""

    prompts: int = 0
    tries: int = 0
    correct: int = 0  # tries that end and that the verifier accepts
    truncated: int = 0  # tries cut at max_completion_tokens
    length_sum: int = 0  # tokens of all tries
    solved: int = 0  # prompts with an answer that is kept
    kept: int = 0
    kept_length_sum: int = 0

    def __add__(self, other: "CellTally") -> "CellTally":
        return CellTally(*(own + more for own, more in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def rates(self) -> Metrics:
        return {
            "accepted": self.correct / self.tries,
            "truncated": self.truncated / self.tries,
            "length": self.length_sum / self.tries,
            "solved": self.solved / self.prompts,
            "kept": float(self.kept),
            "kept_length": self.kept_length_sum / self.kept if self.kept else 0.0,
        }


def run(spec: StageSpec, control: Control, opener: Opener | None = None) -> StageResult:
    """Ask every prompt of the mixture, keep what `config.keep` says; publish data.jsonl and report.json.

    `opener` opens the model for as long as it is asked; absent: in this process. Prompts come in blocks of
    `save_every`, saved one by one in the state folder, so a stage that was stopped asks none again. An answer depends
    on the seed and its prompt alone, never on the blocks.

    Raises StageRefused for a task with too few prompts, StageFailed where no answer at all is kept.
    """
    settings = SampleSettings.model_validate(spec.config)
    sampler = _Sampler(spec, settings)
    state = _State(Path(spec.state))
    blocks = list(sampler.blocks())
    todo = [(cell, rows) for cell, rows in blocks if not state.has(cell, rows)]
    total = sum(len(rows) for _, rows in blocks)
    done = total - sum(len(rows) for _, rows in todo)
    if todo:
        model = role(spec, "model")[0]
        with (opener or in_this_process(spec, settings.rollout))(model) as candidate:
            for cell, rows in todo:
                if control.stop_requested():
                    raise Stopped
                sampled, tally = sampler.answers(candidate, cell, rows)
                done += len(rows)
                state.save(cell, rows, done, sampled, tally)
                if candidate.journal is not None:
                    candidate.journal.clear()
                control.emit(done, total, tally.rates(), phase="sample")
    return _publish(spec, settings, sampler, [(cell, *state.load(cell, rows)) for cell, rows in blocks])


class _Sampler:
    """Draws and judges. Prompts are those that training sees, of a stream of their own."""

    def __init__(self, spec: StageSpec, settings: SampleSettings) -> None:
        self.settings = settings
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "train", stream_seed(spec.seed, "sample"))
        self.cells = [cell_name(task, effort) for task, effort in self.mixer.cells]
        self.seed = stream_seed(spec.seed, "sample-tries")

    def blocks(self) -> Iterator[tuple[int, list[Row]]]:
        """(cell, rows), in the order of asking."""
        wanted, step = self.settings.rollout.prompts, self.settings.save_every
        for cell, (task, _) in enumerate(self.mixer.cells):
            size = self.tasks[task].size("train")
            if size is not None and size < wanted:
                raise StageRefused(
                    f"task {task} has {size} training rows and config.rollout.prompts asks for {wanted}",
                    hint="lower config.rollout.prompts; for more answers a prompt raise group_size and per_prompt",
                )
            for at in range(0, wanted, step):
                yield cell, self.mixer.cell_rows(cell, at, min(step, wanted - at))

    def answers(self, candidate: Candidate, cell: int, rows: list[Row]) -> tuple[list[Sampled], CellTally]:
        """What is kept of the rows' tries, and the count of all."""
        options, size = self.settings.rollout, self.settings.rollout.group_size
        step = len(rows) if candidate.batch is None else max(1, candidate.batch // size)
        kept: list[Sampled] = []
        tally = CellTally()
        for at in range(0, len(rows), step):
            asked = rows[at : at + step]
            _, drawn = roll(candidate.generate, candidate.renderer, asked, options, seed=self.seed, group_size=size)
            texts, lengths = candidate.renderer.texts(drawn.completions), [len(ids) for ids in drawn.completions]
            verdicts = judge(self.tasks, asked, texts, size)
            correct = [verdict.correct and done for verdict, done in zip(verdicts, drawn.finished, strict=True)]
            usable = correct if self.settings.keep == "correct" else drawn.finished
            chosen = self._chosen(usable, len(asked))
            kept += [self._sampled(cell, asked[i // size], i % size, texts[i], lengths[i], correct[i]) for i in chosen]
            tally += CellTally(
                prompts=len(asked),
                tries=len(texts),
                correct=sum(correct),
                truncated=len(texts) - sum(drawn.finished),
                length_sum=sum(lengths),
                solved=len({i // size for i in chosen}),
                kept=len(chosen),
                kept_length_sum=sum(lengths[i] for i in chosen),
            )
        return kept, tally

    def _chosen(self, usable: Sequence[bool], prompts: int) -> list[int]:
        size, most = self.settings.rollout.group_size, self.settings.per_prompt
        groups = (range(row * size, (row + 1) * size) for row in range(prompts))
        return [i for group in groups for i in [i for i in group if usable[i]][:most]]

    def _sampled(self, cell: int, row: Row, number: int, text: str, tokens: int, correct: bool) -> Sampled:
        task, effort = self.mixer.cells[cell]
        prompt = row.prompt
        return Sampled(
            task=task,
            effort=effort or "",
            row=row.index,
            sample=number,
            prompt=prompt.text,
            messages=[dict(message) for message in prompt.messages],
            completion=text,
            columns=dict(prompt.columns),
            tokens=tokens,
            correct=correct,
        )


class _State:
    """Finished blocks, a file each, named by the rows that were asked: another `save_every` finds none of another's.
    `step.json` holds {"step": prompts asked}.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, cell: int, rows: Sequence[Row]) -> Path:
        return self.folder / f"cell-{cell}-rows-{rows[0].index}-{rows[-1].index}.json"

    def has(self, cell: int, rows: Sequence[Row]) -> bool:
        return self._path(cell, rows).exists()

    def save(self, cell: int, rows: Sequence[Row], done: int, sampled: Sequence[Sampled], tally: CellTally) -> None:
        write_whole(self._path(cell, rows), {"rows": [asdict(row) for row in sampled], "tally": asdict(tally)})
        write_whole(self.folder / "step.json", {"step": done})

    def load(self, cell: int, rows: Sequence[Row]) -> tuple[list[Sampled], CellTally]:
        path = self._path(cell, rows)
        try:
            stored = json.loads(path.read_text())
            return [Sampled(**row) for row in stored["rows"]], CellTally(**stored["tally"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error


def _publish(
    spec: StageSpec,
    settings: SampleSettings,
    sampler: _Sampler,
    blocks: Sequence[tuple[int, list[Sampled], CellTally]],
) -> StageResult:
    tallies = dict.fromkeys(sampler.cells, CellTally())
    output = Path(spec.output)
    digest = hashlib.sha256()
    staging = output / f".{DATA}.part"
    with staging.open("wb") as stream:
        for cell, rows, tally in blocks:
            tallies[sampler.cells[cell]] += tally
            for row in rows:
                line = (json.dumps(asdict(row), ensure_ascii=False) + "\n").encode()
                digest.update(line)
                stream.write(line)
    os.replace(staging, output / DATA)
    whole = sum(tallies.values(), CellTally())
    if whole.kept == 0:
        raise StageFailed(
            f"no answer was kept: of {whole.tries} tries {whole.truncated} were cut short and {whole.correct} correct",
            hint="raise group_size or max_completion_tokens, or ask a better model",
        )
    metrics = whole.rates() | {"sampled_tokens": float(whole.length_sum), "sampled_completions": float(whole.tries)}
    for name, tally in tallies.items():
        metrics |= {f"{name}/{key}": value for key, value in tally.rates().items()}
    report: dict[str, Any] = {
        "model": role(spec, "model")[0].label,
        "keep": settings.keep,
        "sha256": digest.hexdigest(),
        "counts": asdict(whole),
        "cells": {name: asdict(tally) | tally.rates() for name, tally in tallies.items()},
    }
    write_whole(output / "report.json", report)
    return StageResult(step=whole.prompts, metrics=metrics)
