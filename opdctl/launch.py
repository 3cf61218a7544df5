"""What a worker is given: references resolved to folders, settings to plain data."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from opdctl.backends import BACKENDS, embedded
from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.errors import OpdctlError, StageRefused
from opdctl.fetch import gguf_folder, hub_folder, imported_gguf
from opdctl.gate import check_files, forget
from opdctl.lineage import HANDED_ON
from opdctl.model_folder import model_files
from opdctl.plan import Plan, PlannedStage
from opdctl.references import Input
from opdctl.settings import AnyTask, GateSettings, NewModel, OpdSettings, RlvrSettings, SftSettings
from opdctl.store import Attempt, Parent
from opdctl.verdicts import Verdict, accept, read_verdicts, refuse


class Launcher:
    """For the stages of a plan that are going to run. Models of the Hugging Face hub are downloaded and GGUF files
    imported at once, unless `fetch` is false: then the repository's name, or the folder to be, stands for the model."""

    def __init__(
        self, plan: Plan, items: Sequence[PlannedStage], report: Callable[[str], None], *, fetch: bool = True
    ) -> None:
        self._plan, self._run, self._pipeline, self._items = plan, plan.run, plan.pipeline, items
        self._outside = _outside_models(items, plan, report, fetch)
        kinds = {item.stage.settings.kind for item in items if BACKENDS[item.stage.settings.backend] is embedded}
        self._judged: dict[str, list[Verdict]] = {}  # stage -> verdicts before anything started
        self.preload = ["opdctl.worker", *embedded.preload(kinds)]

    def backend(self, item: PlannedStage) -> str:
        """Import path of the module that carries the stage out."""
        return cast(ModuleType, BACKENDS[item.stage.settings.backend]).__name__

    def check(self) -> list[str]:
        """What stops the stages from running here, a line each. Where nothing does, the gate looks at the files that
        are there already: raises StageRefused with all that it refuses."""
        by_backend: dict[str, list[StageSpec]] = {}
        for item in self._items:
            by_backend.setdefault(item.stage.settings.backend, []).append(self.draft(item))
        found = [BACKENDS[name].check(specs) for name, specs in by_backend.items()]
        problems = [f"stages.{stage}: {line}" for lines in found for stage, told in lines.items() for line in told]
        if not problems:
            refuse(self.judge_files())
        return problems

    def judge_files(self) -> dict[str, list[Verdict]]:
        """Stage -> what files say about the models and rows that it will read. A stage that is still to run hands on
        the vocabulary and the settings of the model that it begins with, so these are compared already."""
        for item in self._items:
            spec = self.draft(item)
            if spec.gate:
                settings = GateSettings.model_validate(spec.gate["settings"])
                self._judged[item.stage.name] = accept(check_files(spec, settings), settings.accept)
        forget()
        return self._judged

    def commands(self) -> dict[str, str]:
        """Stage -> the shell command that would run it by hand; empty for a stage without one."""
        return {
            item.stage.name: BACKENDS[item.stage.settings.backend].command(self.draft(item)) for item in self._items
        }

    def draft(self, item: PlannedStage) -> StageSpec:
        """To be looked at; `gate` says which inputs are missing, and what stands for them."""
        return self.spec(item, range(item.stage.settings.resources.gpus), None)

    def parents(self, item: PlannedStage) -> list[Parent]:
        """With the record ids of those that this run has made."""
        return [
            replace(parent, record_id=self._record_id(given.target)) if given.kind == "stage" else parent
            for parent, given in zip(item.parents, item.stage.inputs, strict=True)
        ]

    def spec(self, item: PlannedStage, devices: Sequence[int], attempt: Attempt | None) -> StageSpec:
        """Without an attempt: to be checked only."""
        stage, settings = self._run.stage(item.stage.name), item.stage.settings
        model = self._pipeline.settings.model
        return StageSpec(
            stage=item.stage.name,
            kind=settings.kind,
            backend=settings.backend,
            seed=item.stage.seed,
            config=settings.config.model_dump(mode="json"),
            tasks={name: _task_data(task, self._pipeline.folder) for name, task in settings.tasks.items()},
            efforts=settings.efforts.model_dump(mode="json") if settings.efforts else None,
            resources=settings.resources.model_dump(mode="json"),
            workers=self._workers(settings.backend),
            verl=dict(settings.verl),
            devices=list(devices),
            inputs=[
                InputSpec(
                    given.role,
                    given.label,
                    self._folder(given),
                    dict(given.route),
                    given.weight,
                    parent.record_id or (given.ref if given.kind != "stage" else ""),
                )
                for given, parent in zip(
                    item.stage.inputs, self.parents(item) if attempt else item.parents, strict=True
                )
            ],
            workspace=str(self._pipeline.folder),
            new_model=model.model_dump(mode="json") if isinstance(model, NewModel) else None,
            state=str(stage.state),
            output=str(attempt.output) if attempt else "",
            events=str(attempt.events) if attempt else "",
            result=str(stage.result),
            gate=self._gate(item, attempt),
        )

    def _gate(self, item: PlannedStage, attempt: Attempt | None) -> dict[str, Any]:
        """Without verdicts of an earlier attempt on the same stage and parents, the worker asks for them."""
        settings = item.stage.settings.gate
        if settings is None or not settings.enabled:
            return {}
        accepted = sorted({*settings.accept, *self._plan.accept})
        plain = settings.model_dump(mode="json") | {"accept": accepted}
        asked: dict[str, Any] = {"settings": plain, "accepted": accepted}
        if item.stage.settings.kind == "eval":
            asked["trained"] = self._trained(item)
        if attempt is None:
            asked["stand_ins"] = self._stand_ins(item)
            asked["missing"] = [one.label for one in item.stage.inputs if not self._there(one)]
        else:
            key = self._gate_key(item)
            if self._passed(item, key) is not None:
                return {"accepted": accepted}
            asked |= {"file": str(attempt.gate), "key": key}
        return asked

    def _trained(self, item: PlannedStage) -> dict[str, Any]:
        """Tasks that the stages upstream train on."""
        stages, waiting = self._pipeline.stages, [item.stage]
        found: dict[str, Any] = {}
        seen: set[str] = set()
        while waiting:
            for name in waiting.pop().upstream() - seen:
                seen.add(name)
                waiting.append(stages[name])
                settings = stages[name].settings
                if isinstance(settings.config, SftSettings | RlvrSettings | OpdSettings):
                    found |= {key: _task_data(task, self._pipeline.folder) for key, task in settings.tasks.items()}
        return found

    def _there(self, given: Input) -> bool:
        if given.kind == "stage":
            return self._run.stage(given.target).record() is not None
        folder = Path(self._folder(given))  # of a repository that was not fetched its name
        return given.kind == "model" or (folder.is_absolute() and folder.is_dir())

    def _stand_ins(self, item: PlannedStage) -> dict[str, str]:
        """Number of an input that is still to be made -> folder of the model that it begins with, "" for a new one."""
        found = {}
        for number, given in enumerate(item.stage.inputs):
            if not self._there(given):
                folder = self._begins_with(given)
                if folder is not None:
                    found[str(number)] = folder
        return found

    def _begins_with(self, given: Input) -> str | None:
        """None where that is not known yet: of a merge and a selection any of the models would do, if one is there."""
        if given.kind == "model":
            return ""
        if given.kind != "stage":
            return self._folder(given)
        if self._there(given):
            return str(self._run.stage(given.target).checkpoint)
        inputs = self._pipeline.stages[given.target].inputs
        first = [one for role in HANDED_ON for one in inputs if one.role == role]
        return self._begins_with(first[0]) if first else None

    def _gate_key(self, item: PlannedStage) -> str:
        settings = item.stage.settings.gate
        ids = [parent.record_id for parent in self.parents(item)]
        judged = [item.fingerprint, ids, settings.model_dump_json() if settings else ""]
        return sha256(json.dumps(judged).encode()).hexdigest()[:20]

    def _passed(self, item: PlannedStage, key: str) -> list[Verdict] | None:
        """Verdicts of an attempt that the gate let through."""
        for attempt in reversed(self._run.stage(item.stage.name).attempts()):
            verdicts = read_verdicts(attempt.gate, key)
            if verdicts is not None and not any(verdict.stops for verdict in verdicts):
                return verdicts
        return None

    def accepted(self, item: PlannedStage) -> list[str]:
        """Names of checks that refused the stage, and were accepted."""
        verdicts = [*(self._passed(item, self._gate_key(item)) or []), *self._judged.get(item.stage.name, [])]
        return sorted({verdict.check for verdict in verdicts if verdict.accepted})

    def _workers(self, backend: str) -> dict[str, Any]:
        if backend == "embedded":
            return {}
        plain: dict[str, Any] = getattr(self._pipeline.settings.workers, backend).model_dump(mode="json")
        # not resolved: the interpreter of a virtual environment is a link, and knows its environment by its own path
        return plain | {"python": str((self._pipeline.folder / plain["python"]).absolute())}

    def _folder(self, given: Input) -> str:
        if given.kind == "stage":
            return str(self._run.stage(given.target).checkpoint)
        return self._outside.get(given.ref, "")

    def _record_id(self, stage: str) -> str:
        if (record := self._run.stage(stage).record()) is None:
            raise StageRefused(f"the checkpoint of stage '{stage}' is gone: {self._run.stage(stage).damage()}")
        return record.id


def _outside_models(
    items: Sequence[PlannedStage], plan: Plan, report: Callable[[str], None], fetch: bool
) -> dict[str, str]:
    """Reference -> folder, of models that no stage makes."""
    found: dict[str, str] = {}
    folder, digests = plan.pipeline.folder, plan.run.workspace.digests()
    ours = (item for item in items if BACKENDS[item.stage.settings.backend] is embedded)
    computed = {given.ref for item in ours for given in item.stage.inputs}
    for given in {given.ref: given for item in items for given in item.stage.inputs}.values():
        match given.kind:
            case "path":
                found[given.ref] = str((folder / given.target).resolve())
            case "gguf":
                file = folder / given.target
                digest = digests.file(file)
                made = imported_gguf(file, digest, folder, report) if fetch else gguf_folder(folder, digest)
                found[given.ref] = str(made.resolve())
            case "hf" if not fetch:
                found[given.ref] = given.target.partition("@")[0]
            case "hf":
                report(f"fetching {given.ref}")
                found[given.ref] = str(_whole(hub_folder(given.target), given.ref, computed=given.ref in computed))
    return found


def _whole(folder: Path, ref: str, *, computed: bool) -> Path:
    try:
        model_files(folder, computed=computed)
    except OpdctlError as error:
        raise StageRefused(f"{ref}: {error}", hint=error.hint) from None
    return folder


def _task_data(task: AnyTask, folder: Path) -> dict[str, Any]:
    """A task's settings with absolute paths."""
    plain: dict[str, Any] = task.model_dump(mode="json")
    return plain | {key: str((folder / plain[key]).resolve()) for key in ("path", "eval_path") if plain.get(key)}
