"""The step loop that every training stage shares: resume, update, report, save, stop.

A stage gives one function, `iteration(step) -> metrics`, which samples what it needs and calls `Trainer.update` once
for each optimizer step. All that happens outside is here, so a stage killed at any instant goes on bit by bit.
"""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec, Stopped
from opdctl.engine.batch import TokenBatch
from opdctl.engine.checkpoint import Tokenizer, load_policy, load_tokenizer, load_vocabulary, new_policy, save_policy
from opdctl.engine.journal import open_journal
from opdctl.engine.lora import ADAPTER, Adapters
from opdctl.engine.optim import AdamW, learning_rate
from opdctl.engine.policy import Policy
from opdctl.engine.recovery import Recovery, Save
from opdctl.engine.tokenizer import word_tokenizer
from opdctl.errors import StageFailed
from opdctl.memory import GIB, Memory, Training, shape_of_folder, shape_of_new, training_memory
from opdctl.settings import (
    TASKS,
    EffortSettings,
    NewModel,
    OpdSettings,
    RlvrSettings,
    Rollout,
    SftSettings,
    Train,
)
from opdctl.tasks import Task, load_task
from opdctl.tasks.sampled import read_sampled
from opdctl.workers import Resources

Metrics = dict[str, float]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(spec: StageSpec) -> torch.device:
    # the runner leases GPUs by CUDA_VISIBLE_DEVICES, so the first visible one is ours
    return torch.device("cuda:0" if spec.devices else "cpu")


def role(spec: StageSpec, name: str) -> list[InputSpec]:
    return [given for given in spec.inputs if given.role == name]


def open_tasks(spec: StageSpec) -> dict[str, Task]:
    efforts = EffortSettings.model_validate(spec.efforts) if spec.efforts else None
    return {
        name: load_task(name, TASKS[given["task"]].model_validate(given), efforts) for name, given in spec.tasks.items()
    }


def open_demonstrations(spec: StageSpec) -> dict[str, Task]:
    """The tasks of an SFT stage, with the answers that stages of its input role `data` sampled as demonstrations."""
    tasks, folders = open_tasks(spec), [given.path for given in role(spec, "data")]
    return read_sampled(folders, tasks) if folders else tasks


def completions_per_call(spec: StageSpec, rollout: Rollout) -> int:
    """How many can be drawn at once within `resources.micro_batch_tokens`."""
    return max(
        1, int(spec.resources["micro_batch_tokens"]) // (rollout.max_prompt_tokens + rollout.max_completion_tokens)
    )


def open_policy(spec: StageSpec, given: InputSpec, precision: str = "float32") -> tuple[Policy, Tokenizer]:
    """The model of an input, and its tokenizer; a new one where the input names none."""
    if given.path:
        policy = load_policy(given.path, device=device_of(spec), dtype=DTYPES[precision])
        return policy, load_tokenizer(given.path)
    policy, tokenizer = new_policy(NewModel.model_validate(spec.new_model), spec.seed)
    return policy.to(device=device_of(spec), dtype=DTYPES[precision]), tokenizer


def open_vocabulary(spec: StageSpec, given: InputSpec) -> tuple[Tokenizer, tuple[int, ...], int]:
    """(tokenizer, EOS ids, number of logits) of an input, without its weights."""
    if given.path:
        return load_vocabulary(given.path)
    words = NewModel.model_validate(spec.new_model).tokenizer.words
    return word_tokenizer(words), (2,), len(words)


def open_frozen(spec: StageSpec, given: InputSpec, precision: str = "float32") -> Policy:
    """A reference, budget or teacher model: no gradients."""
    if given.path:  # without its tokenizer
        policy = load_policy(given.path, device=device_of(spec), dtype=DTYPES[precision])
    else:
        policy = open_policy(spec, given, precision)[0]
    return policy.requires_grad_(False).eval()


def _expected_memory(spec: StageSpec) -> Memory | None:
    given, roles = (*role(spec, "init"), *role(spec, "student"))[0], [given.role for given in spec.inputs]
    shape = shape_of_folder(Path(given.path)) if given.path else shape_of_new(NewModel.model_validate(spec.new_model))
    if shape is None:
        return None
    kinds: dict[str, type[Training]] = {"sft": SftSettings, "rlvr": RlvrSettings, "opd": OpdSettings}
    settings = kinds[spec.kind].model_validate(spec.config)
    resources = Resources.model_validate(spec.resources)
    return training_memory(shape, settings, resources, roles=roles, gpu=bool(spec.devices))


class Trainer:
    """A policy under training, its optimizer and its recovery state."""

    def __init__(self, spec: StageSpec, control: Control, train: Train, policy: Policy, tokenizer: Tokenizer) -> None:
        self.spec, self.control, self.train = spec, control, train
        self.policy, self.tokenizer = policy, tokenizer
        self.adapters = Adapters(policy, train.lora, spec.seed) if train.lora else None
        self._trained = self.adapters.parameters if self.adapters else dict(policy.named_parameters())
        if spec.resources.get("gradient_checkpointing"):
            policy.checkpoint_activations()
        self.optimizer = AdamW(self._trained, train.optimizer)
        self.step = 0
        self.position: dict[str, int] = {}  # data positions and what was spent; saved and restored with the weights
        self.extra: dict[str, Tensor] = {}  # whatever else a resumed stage needs; saved and restored alike
        self.journal = open_journal(spec)  # of what is drawn between two saves
        self._began = time.process_time()
        self._metrics: Metrics = {}
        self._recovery = Recovery(spec.state)
        if (saved := self._recovery.load()) is not None:
            self._restore(saved)

    def fit(self, iteration: Callable[[int], Metrics], *, updates: int = 1) -> StageResult:
        """Run `iteration` until max_steps; each calls `update` `updates` times. Publishes the policy at the end."""
        metrics = self._metrics
        saved_at = self.step
        while self.step < self.train.max_steps:
            began, before = time.perf_counter(), self.step
            if self.journal is not None:
                self.journal.begin(f"step-{self.step}")
            metrics = iteration(self.step)
            if self.step - before != updates:
                raise AssertionError(f"iteration made {self.step - before} optimizer steps, not {updates}")
            if "tokens" in metrics:
                tokens = metrics.pop("tokens")
                self.position["tokens"] = self.position.get("tokens", 0) + round(tokens)
                metrics["tokens_per_s"] = tokens / (time.perf_counter() - began)
            self.control.emit(self.step, self.train.max_steps, metrics)
            stop = self.control.stop_requested() and self.step < self.train.max_steps
            if stop or self.step - saved_at >= self.train.save_every or self.step == self.train.max_steps:
                self._save(metrics)
                saved_at = self.step
            if stop:
                raise Stopped
        output = Path(self.spec.output)
        save_policy(self.policy, self.tokenizer, output, dtype=DTYPES[self.train.precision])
        if self.adapters:
            self.adapters.save(output / ADAPTER)
        return StageResult(step=self.step, metrics={**metrics, **self._cost()})

    def _cost(self) -> Metrics:
        """What the steps up to here took, in all attempts; what a kill undid counts once."""
        cost = {"cpu_seconds": self._cpu_ms() / 1000}
        if (expected := _expected_memory(self.spec)) is not None:
            cost["expected_memory_gib"] = expected.peak / GIB  # peak_memory_gib is what it was
        if "rows" in self.position:  # a stage that asks a model: SFT draws no prompts
            cost["sampled_tokens"] = float(self.position.get("tokens", 0))
            trained_on = self.position["rows"] * self.spec.config["rollout"]["group_size"]
            cost["sampled_completions"] = float(trained_on + self.position.get("held_out", 0))
        return cost

    def _cpu_ms(self) -> int:
        return self.position.get("cpu_ms", 0) + round(1000 * (time.process_time() - self._began))

    def update(self, losses: Iterable[tuple[Tensor, TokenBatch]]) -> Metrics:
        """One optimizer step on the sum of micro-batch losses; each is back-propagated before the next is asked for.

        Without any loss the step counts and changes nothing.
        Raises StageFailed on a non-finite loss or gradient, before the weights are touched.
        """
        self.optimizer.zero_grad()
        lr = learning_rate(self.train.optimizer, self.step, self.train.max_steps)
        total, parts = 0.0, 0
        for loss, batch in losses:
            parts += 1
            value = float(loss.detach())
            total += value
            if not math.isfinite(value):
                self._refuse("loss", value, batch)
            loss.backward()
        norm = 0.0
        if parts:
            norm = self.optimizer.clip()
            if not math.isfinite(norm):
                self._refuse("grad_norm", norm, batch)
            self.optimizer.step(lr)
            if self.adapters:
                self.adapters.merge()
        self.step += 1
        return {"loss": total, "grad_norm": norm, "lr": lr}

    def _refuse(self, what: str, value: float, batch: TokenBatch) -> None:
        record = Path(self.spec.state) / f"refused-step-{self.step}.safetensors"
        record.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"ids": batch.ids_BT, "targets": batch.targets_N, "rows": batch.rows_N}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, record)
        raise StageFailed(
            f"{what} is {value} at step {self.step}: the step is refused, the weights are as before it",
            hint=f"the batch is in {record}; lower config.train.optimizer.lr or max_grad_norm, or mend the data",
        )

    def _save(self, metrics: Metrics) -> None:
        weights = {f"policy.{name}": value.detach() for name, value in self._trained.items()}
        moments = {f"optimizer.{name}": value for name, value in self.optimizer.state_tensors().items()}
        position = {**self.position, "cpu_ms": self._cpu_ms()}
        extra = {f"extra.{name}": value for name, value in self.extra.items()}
        self._recovery.save(Save(self.step, position, metrics, {**weights, **moments, **extra}))
        if self.journal is not None:
            self.journal.clear()

    def _restore(self, saved: Save) -> None:
        self.step, self.position, self._metrics = saved.step, dict(saved.position), dict(saved.metrics)
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(saved.tensors[f"policy.{name}"])
        moments, self.extra = (
            {k.removeprefix(prefix): v for k, v in saved.tensors.items() if k.startswith(prefix)}
            for prefix in ("optimizer.", "extra.")
        )
        self.optimizer.load_state_tensors(moments)
        if self.adapters:
            self.adapters.merge()


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
