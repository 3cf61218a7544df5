"""Token budgets of a verl stage's prompts, all before verl starts: there is no engine to ask once it trains."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from opdctl.backends.contract import Control, InputSpec, StageSpec, Stopped
from opdctl.backends.vllm.offline import Offline
from opdctl.engine.checkpoint import load_policy, new_policy
from opdctl.engine.effort import BudgetEstimator
from opdctl.engine.loop import completions_per_call, role
from opdctl.engine.rows import Mixer, Renderer, Row
from opdctl.engine.sampling import Completions, Generate, sample
from opdctl.settings import NewModel, RlvrSettings
from opdctl.weight_files import weight_files
from opdctl.workers import VerlResources, VllmResources

OWN_ENGINE_BYTES = 64 * 2**20  # weights of a model that is asked faster here than vLLM starts
TELL_S = 1.0  # between two events

Budgets = Callable[[list[Row]], list[float]]


@contextmanager
def budgets(
    spec: StageSpec, control: Control, settings: RlvrSettings, mixer: Mixer, renderer: Renderer
) -> Iterator[Budgets]:
    """b0(x) in tokens of rows, in the order in which they are dealt, as `BudgetEstimator` estimates it.

    The progress events have step 0 and no metrics. Raises Stopped when asked to stop.
    """
    assert settings.effort is not None
    early = _Early(control, settings.train.max_steps)
    cold_start = role(spec, "budget")[0]
    with _asked(spec, early, cold_start, settings) as (generate, batch):
        estimator = BudgetEstimator(generate, mixer, renderer, settings.effort.budget, settings.rollout)

        def estimate(rows: list[Row]) -> list[float]:
            if control.stop_requested():
                raise Stopped
            early.emit(0, 0, {}, f"up to row {max(row.index for row in rows)}")
            return estimator.budgets(rows, batch=batch)

        yield estimate


@contextmanager
def _asked(
    spec: StageSpec, control: Control, given: InputSpec, settings: RlvrSettings
) -> Iterator[tuple[Generate[Completions], int | None]]:
    """The cold-start model, and how many completions to ask it for at a time: a small one on the CPU of this process,
    which leaves GPUs empty; a large one in vLLM, which is gone when verl starts."""
    if not given.path or sum(path.stat().st_size for path in weight_files(Path(given.path))) <= OWN_ENGINE_BYTES:
        new = NewModel.model_validate(spec.new_model) if not given.path else None
        policy = new_policy(new, spec.seed)[0] if new else load_policy(given.path)
        yield partial(sample, policy), completions_per_call(spec, settings.rollout)
        return
    verl = VerlResources.model_validate(spec.resources["verl"])
    resources = VllmResources(tensor_parallel=verl.rollout_tensor_parallel, max_num_seqs=verl.max_num_seqs)
    with Offline(spec, control, settings.rollout, resources) as vllm, vllm.open(given) as candidate:
        yield candidate.generate, candidate.batch


class _Early:
    """The stage's control as long as no step is done."""

    def __init__(self, control: Control, total: int) -> None:
        self._control, self._total, self._told = control, total, 0.0

    def stop_requested(self) -> bool:
        return self._control.stop_requested()

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._control.emit(0, self._total, {}, f"budgets: {phase}")
