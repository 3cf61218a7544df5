"""Reasoning effort as a token budget (Kimi K3): b0(x) estimated from the cold-start model, tau lowered rung by rung."""

import math

from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import Completions, Generate
from opdctl.settings import Budget, Rollout

_BLOCK = 256  # rows estimated at a time; block borders depend on row numbers alone, so a resumed stage agrees


class BudgetEstimator:
    """b0(x) of a mixture's rows: a percentile of the lengths of the cold-start model's own answers to x, which
    `generate` draws.

    Lengths are in tokens that the model wrote, EOS included. Where no sample counts, b0 is the completion limit.
    """

    def __init__(
        self, generate: Generate[Completions], mixer: Mixer, renderer: Renderer, settings: Budget, rollout: Rollout
    ) -> None:
        self.generate, self.mixer, self.renderer = generate, mixer, renderer
        self.settings, self.rollout = settings, rollout
        self._blocks: dict[tuple[str, int, int], list[float]] = {}

    def budgets(self, rows: list[Row], *, batch: int | None) -> list[float]:
        """b0 of each row, in tokens; `batch` completions are drawn at a time, None: as many as there are to draw."""
        found: list[float] = []
        for row in rows:
            block = row.index // _BLOCK
            key = (row.task, self.mixer.stream(row.cell), block)
            if key not in self._blocks:
                self._blocks[key] = self._estimate(row, block, batch)
            found.append(self._blocks[key][row.index % _BLOCK])
        return found

    def _estimate(self, row: Row, block: int, batch: int | None) -> list[float]:
        size = self.mixer.tasks[row.task].size(self.mixer.split)
        count = _BLOCK if size is None or self.mixer.split == "train" else min(_BLOCK, size - block * _BLOCK)
        rows = self.mixer.cell_rows(row.cell, block * _BLOCK, count, self.settings.effort)
        per_call = count if batch is None else max(1, batch // self.settings.samples)
        return [b0 for at in range(0, count, per_call) for b0 in self._sampled(rows[at : at + per_call])]

    def _sampled(self, rows: list[Row]) -> list[float]:
        samples = self.settings.samples
        seed = stream_seed(self.mixer.seed, "budget")
        _, rollout = roll(self.generate, self.renderer, rows, self.rollout, seed=seed, group_size=samples)
        finished = rollout.finished
        counted = finished
        if self.settings.over == "correct":
            texts = self.renderer.texts(rollout.completions)
            verdicts = judge(self.mixer.tasks, rows, texts, samples, rollout.episodes)
            counted = [done and verdict.correct for done, verdict in zip(finished, verdicts, strict=True)]
        found: list[float] = []
        for at in range(0, len(rows) * samples, samples):
            group = range(at, at + samples)
            chosen = [i for i in group if counted[i]] or [i for i in group if finished[i]]
            lengths = [rollout.counted[i] for i in chosen]
            found.append(percentile(lengths, self.settings.percentile, self.rollout.max_completion_tokens))
        return found


def percentile(values: list[int], percent: float, default: float) -> float:
    """The nearest-rank percentile; `default` of an empty list."""
    if not values:
        return float(default)
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return float(sorted(values)[rank - 1])
