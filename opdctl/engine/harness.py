"""Evaluation by EleutherAI's lm-evaluation-harness: its tasks on our checkpoints, in the form of our own report.

lm-eval loads the models by transformers itself, so that what it finds owes nothing to the engine.
"""

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine.checkpoint import save_new_model
from opdctl.engine.eval_report import CellScore
from opdctl.engine.loop import device_of
from opdctl.engine.recovery import write_whole
from opdctl.engine.scores import CellCounts
from opdctl.errors import StageFailed, StageRefused
from opdctl.references import near_miss
from opdctl.settings import HarnessSettings, NewModel
from opdctl.weight_files import weight_files

Sample = Mapping[str, Any]  # of lm-eval's log: a problem under one filter


class _Model(Protocol):
    """What is asked of lm-eval's `HFLM` besides answers."""

    max_length: int
    max_gen_toks: int

    def tok_encode(self, string: str) -> list[int]: ...


class Harness:
    """Examines one model after another."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self.settings = HarnessSettings.model_validate(spec.config)

    def score(self, model: InputSpec) -> tuple[dict[str, CellScore], list[dict[str, Any]]]:
        """The scores of each task, and the outcomes of its problems as `outcomes.jsonl` has them.

        Raises StageRefused for tasks that there are not or that run code of a model, StageFailed for data that cannot
        be had, for a metric that is not 0 or 1, and for a prompt that lm-eval would have cut.
        """
        from lm_eval.models.huggingface import HFLM

        folder, wanted = self._folder(model), self.settings
        weight_files(folder)  # whole, and no pickles
        lm = HFLM(
            pretrained=str(folder),
            dtype=wanted.precision,
            device=str(device_of(self.spec)),
            batch_size=wanted.batch_size,
            trust_remote_code=False,
            use_safetensors=True,
        )
        scores: dict[str, CellScore] = {}
        outcomes: list[dict[str, Any]] = []
        chosen: dict[str, str] = {}
        for task, samples in self._answered(lm).items():
            metric, name = _metric(task, samples, wanted.metrics.get(task))
            own = sorted((s for s in samples if s["filter"] == name), key=lambda sample: int(sample["doc_id"]))
            solved = [_solved(task, metric, sample) for sample in own]
            written = [_written(task, sample, lm) for sample in own]
            scores[task] = _counted(solved, written)
            chosen[task] = f"{metric},{name}"
            outcomes += [
                {"model": model.label, "cell": task, "problem": number, "sample": 0, "correct": right}
                | {"tokens": length, "completion": text}
                for number, (right, (text, length, _)) in enumerate(zip(solved, written, strict=True))
            ]
        write_whole(self._chosen, chosen)
        return scores, outcomes

    def about(self) -> dict[str, Any]:
        """What the report tells beside the scores: lm-eval's version, and the metric and filter of each task."""
        return {"lm_eval": version("lm_eval"), "metrics": json.loads(self._chosen.read_text())}

    @property
    def _chosen(self) -> Path:
        return Path(self.spec.state) / "metrics.json"

    def _folder(self, model: InputSpec) -> Path:
        if model.path:
            return Path(model.path)
        folder = Path(self.spec.state) / "new-model"
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_new_model(NewModel.model_validate(self.spec.new_model), self.spec.seed, folder)
        return folder

    @cached_property
    def _manager(self) -> Any:
        """lm-eval's list of tasks, in which the settings' are. What it makes of data stays in the state folder."""
        import datasets
        from lm_eval.tasks import TaskManager

        datasets.config.HF_DATASETS_CACHE = Path(self.spec.state) / "datasets"
        wanted, folder = self.settings.tasks, self.settings.include_path
        if folder is not None:
            own = TaskManager(include_path=folder, include_defaults=False)
            if set(wanted) <= set(own.all_tasks):  # reading the thousands that are packaged takes half a minute
                return own
        manager = TaskManager(include_path=folder)
        for name in wanted:
            if name not in manager.all_tasks:
                raise StageRefused(
                    f"lm-eval has no task '{name}'" + near_miss(name, manager.all_tasks, "tasks"),
                    hint="correct config.tasks, or give the folder of your own task files: config.include_path",
                )
        return manager

    def _answered(self, lm: object) -> dict[str, list[Sample]]:
        """Task -> its log. Tasks are lm-eval's own, those of groups one by one."""
        from lm_eval import simple_evaluate

        wanted = self.settings
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        try:
            results = simple_evaluate(
                model=lm,
                tasks=list(wanted.tasks),
                task_manager=self._manager,
                num_fewshot=wanted.num_fewshot,
                limit=wanted.limit,
                apply_chat_template=wanted.apply_chat_template,
                log_samples=True,
                bootstrap_iters=0,
                **dict.fromkeys(seeds, wanted.seed),
            )
        except OSError as error:  # what `datasets` and the hub raise
            raise StageFailed(
                f"the data of {', '.join(wanted.tasks)} cannot be had: {error}",
                hint="lm-eval's packaged tasks take theirs from the Hugging Face hub; a task file of your own "
                "(config.include_path) with dataset_path: json reads files of the workspace",
            ) from error
        except ValueError as error:
            raise StageRefused(f"lm-eval does not run {', '.join(wanted.tasks)}: {error}") from error
        found: dict[str, list[Sample]] = results["samples"]
        return found


def _metric(task: str, samples: Items[Sample], wanted: str | None) -> tuple[str, str]:
    """Metric and filter: those asked for, else the first."""
    known = list(dict.fromkeys((metric, s["filter"]) for s in samples for metric in s["metrics"]))
    if wanted is None:
        return known[0]
    metric, _, name = wanted.partition(",")
    for found in known:
        if found[0] == metric and name in ("", found[1]):
            return found
    told = ", ".join(f"'{','.join(pair)}'" for pair in known)
    raise StageRefused(f"task {task} has no metric '{wanted}'; it has {told}", hint="correct config.metrics")


def _solved(task: str, metric: str, sample: Sample) -> bool:
    value = sample[metric]
    if not isinstance(value, list | tuple) and value in (0, 1):
        return bool(value)
    raise StageFailed(
        f"task {task}: {metric} of problem {sample['doc_id']} is {value!r}, and solved or not is 1 or 0",
        hint=f"name another metric of the task: config.metrics: {{{task}: ...}}; it has {', '.join(sample['metrics'])}",
    )


def _written(task: str, sample: Sample, lm: _Model) -> tuple[str, int, bool]:
    """What the model wrote, or of several choices the likeliest; its tokens, 0 for a choice; was it cut at the limit?

    lm-eval tells no tokens, so they are counted anew in the text. Raises StageFailed for a prompt that does not fit the
    model's positions, of which lm-eval would have dropped the beginning.
    """
    choices = list(_choices(sample))
    if not choices:
        prompt, options = sample["arguments"][0]
        limit = int(options.get("max_gen_toks", lm.max_gen_toks))
        room, text = lm.max_length - limit, str(sample["resps"][0][0])
        longest, length = len(lm.tok_encode(prompt)), len(lm.tok_encode(text))
        found = text, length, length >= limit
    else:
        room = lm.max_length
        longest = max(len(lm.tok_encode(prompt + choice)) for _, prompt, choice in choices)
        found = max(choices)[2], 0, False
    if longest > room:
        raise StageFailed(
            f"task {task}: problem {sample['doc_id']} has {longest} tokens, and the model room for {room}: lm-eval "
            "dropped the beginning of the prompt",
            hint="lower config.num_fewshot, or max_gen_toks in the task file",
        )
    return found


def _choices(sample: Sample) -> Iterator[tuple[float, str, str]]:
    """Log-probability, prompt and text of each choice; none for a task that has the model write."""
    for (prompt, text), answers in zip(sample["arguments"], sample["resps"], strict=True):
        if isinstance(text, str):
            yield float(answers[0][0]), str(prompt), text


def _counted(solved: Items[bool], written: Items[tuple[str, int, bool]]) -> CellScore:
    counts = CellCounts(
        n=len(solved),
        correct=sum(solved),
        within=None,
        length_sum=sum(length for _, length, _ in written),
        truncated=sum(cut for _, _, cut in written),
        correct_squares=sum(solved),
    )
    return CellScore(counts, {"1": sum(solved) / len(solved)})
