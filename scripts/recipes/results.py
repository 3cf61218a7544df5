"""A finished run, opened by its name: what its evaluations found, how its stages went, and what they cost."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from opdctl.comparison import curves
from opdctl.engine.scores import Estimate, by_domain, difference, weighted_sum
from opdctl.errors import OpdctlError
from opdctl.references import SEED, add_axis, select
from opdctl.store import Record, StageDir, Workspace

Metric = Literal["accuracy", "within_budget"]


class Report:
    """What one eval stage found. Models go by their labels: `sft`, `max[domain=general]`."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.cells: list[str] = data["cells"]  # "general.max": task and effort
        self._models: Mapping[str, Mapping[str, Any]] = data["models"]
        self._normalised: Mapping[str, float] = data["normalised_score"]

    @property
    def models(self) -> list[str]:
        return list(self._models)

    def score(self, model: str, cells: Sequence[str] = (), metric: Metric = "accuracy") -> Estimate:
        """Plain mean over the cells, all of them where none is named."""
        found, chosen = self._of(model), list(cells) or self.cells
        return weighted_sum([(1 / len(chosen), Estimate(**found[cell][metric])) for cell in chosen])

    def gain(self, after: str, before: str, cells: Sequence[str] = (), metric: Metric = "accuracy") -> Estimate:
        """score(after) - score(before); the interval takes the two for unpaired, which is on the wide side."""
        return difference(self.score(after, cells, metric), self.score(before, cells, metric))

    def teachers(self, before: str, teacher: Mapping[str, str], metric: Metric = "accuracy") -> Estimate:
        """Gain over `before` of the models that `teacher` names for each cell."""
        gains = [self.gain(model, before, [cell], metric) for cell, model in teacher.items()]
        return weighted_sum([(1 / len(gains), gain) for gain in gains])

    def domains(self, model: str | Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Task -> effort -> accuracy, as `scores.normalised_score` reads it. `model` may go by task."""
        routed = {cell: model if isinstance(model, str) else model[cell.partition(".")[0]] for cell in self.cells}
        return by_domain({cell: self.score(chosen, [cell]).value for cell, chosen in routed.items()})

    def length(self, model: str, cell: str) -> float:
        """Mean tokens of an answer, its end included."""
        return float(self._of(model)[cell]["length_mean"])

    def pass_at(self, model: str, k: int, cells: Sequence[str] = ()) -> float:
        """Plain mean over the cells of the share of prompts that k samples solve."""
        chosen = list(cells) or self.cells
        return fmean(float(self._of(model)[cell]["pass_k"][str(k)]) for cell in chosen)

    def agreement(self, model: str, cell: str) -> Estimate:
        """How often the stage's grader says of the model's answers what the verifier does."""
        return Estimate(**self._of(model)[cell]["grader"]["agreement"])

    def normalised(self, model: str, metric: Literal["accuracy", "within"] = "accuracy") -> float:
        """The MOPD paper's score: 0 as the student before, 1 as the teachers."""
        key = f"{model}/{metric}"
        if key not in self._normalised:
            raise OpdctlError(f"the report has no normalised score of {key}: it has {sorted(self._normalised)}")
        return float(self._normalised[key])

    def _of(self, model: str) -> Mapping[str, Any]:
        if model not in self._models:
            raise OpdctlError(f"the report has no model {model}: it has {self.models}")
        return self._models[model]


class Results:
    """Stages go by their names in the run, seed included where the run has several: `mopd[loss=topk,seed=1]`."""

    def __init__(self, workspace: Path, run: str) -> None:
        self._run = Workspace(workspace).run(run)
        self.settings: Mapping[str, Any] = self._run.read_pipeline()
        if not self.settings:
            raise OpdctlError(f"no run {run} in {workspace}", hint="run the recipe first")

    @cached_property
    def stages(self) -> list[str]:
        """In the order of the pipeline."""
        return list(self.settings["stages"])

    @property
    def seeds(self) -> list[int]:
        return list(self.settings.get("seeds") or [self.settings["seed"]])

    def named(self, selector: str) -> list[str]:
        """`max`, `max[*]`, `max[domain=general]`: the instances that it means."""
        return select(self.stages, selector)

    def report(self, stage: str = "eval", seed: int | None = None) -> Report:
        """Of an eval stage; `seed` is required where the run has several."""
        if self.settings.get("seeds"):
            stage = add_axis(stage, SEED, seed)
        return Report(json.loads((self.checkpoint(stage) / "report.json").read_text()))

    def reports(self, stage: str = "eval") -> list[Report]:
        """One for each seed."""
        return [self.report(stage, seed) for seed in self.seeds]

    def record(self, stage: str) -> Record:
        found = self._stage(stage).record()
        if found is None:
            raise OpdctlError(f"stage {stage} of run {self._run.name} has not finished")
        return found

    def checkpoint(self, stage: str) -> Path:
        """The folder that a finished stage published."""
        self.record(stage)
        return self._stage(stage).checkpoint

    def metric(self, stage: str, name: str) -> float:
        """The last value, as the record has it."""
        metrics = self.record(stage).metrics
        if name not in metrics:
            raise OpdctlError(f"stage {stage} of run {self._run.name} has no metric {name}: it has {sorted(metrics)}")
        return float(metrics[name])

    def curve(self, stage: str, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric while the stage trained, wherever its checkpoint was made."""
        self.record(stage)
        found = curves(self._stage(stage)).get(name)
        if found is None:
            raise OpdctlError(f"stage {stage} of run {self._run.name} reported no metric {name} while it trained")
        return list(zip(found.steps, found.values, strict=True))

    def cost(self, selector: str) -> float:
        """Seconds of one core that the stages took, reused ones included."""
        return sum(_seconds(self.record(stage)) for stage in self.named(selector))

    def own_cost(self) -> float:
        """Seconds of one core of all stages that were carried out in this run and not reused from another."""
        own = [stage for stage in self.stages if self._stage(stage).reference() is None]
        return sum(_seconds(self.record(stage)) for stage in own)

    def _stage(self, stage: str) -> StageDir:
        if stage not in self.stages:
            raise OpdctlError(f"run {self._run.name} has no stage {stage}: it has {self.stages}")
        return self._run.stage(stage)


def first_step(curve: Sequence[tuple[int, float]], bound: float, window: int) -> int | None:
    """The first step at which the mean of the last `window` values is as high as `bound`."""
    means = (
        (curve[end - 1][0], fmean(value for _, value in curve[end - window : end]))
        for end in range(window, len(curve) + 1)
    )
    return next((step for step, mean in means if mean >= bound), None)


def _seconds(record: Record) -> float:
    # stages of verl and vLLM work in processes of their own, and merges take next to nothing: time on the clock
    return record.metrics.get("cpu_seconds", record.seconds)
