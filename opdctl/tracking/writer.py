"""Brings MLflow to what the disk says. Every call can be repeated, after an error or by a later process.

Nothing is found again by memory: runs by their tags, the end of a curve by the `step` metric in MLflow itself,
models by their record's id. So a call whose answer was lost does not double anything.
"""

import getpass
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail
from opdctl.records import SELECTION, Parent
from opdctl.secrets import redact
from opdctl.store import Attempt, StageDir
from opdctl.tracking import guards
from opdctl.tracking.journal import Ending, Entry, Published, curves
from opdctl.tracking.names import LONGEST_TAG, MARKER, Flat, cut, fit, flatten_metrics, flatten_params, safe_name
from opdctl.tracking.server import Target, Unreachable, asking, connect, probe, search_runs, send

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

BATCH = 900  # metrics in one request; MLflow takes 1000 of all things together
PARAMS = 100  # params or tags in one request, MLflow's limit
REPORTS = ("report.json", SELECTION)


@dataclass
class Curve:
    """One MLflow run of a stage, as far as this process knows it."""

    run_id: str
    cursor: int  # last step that MLflow has
    closed: str  # value of the tag `opdctl.closed`
    tails: dict[int, EventTail] = field(default_factory=dict)  # attempt -> its events
    attempt: int = 0  # last attempt that was announced
    owed: bool = False  # its settings are not there yet as a file
    guarded: dict[int, tuple[int, ...]] = field(default_factory=dict)  # attempt -> state of its guards' files, as told


class Writer:
    def __init__(self, target: Target, complain: Callable[[str], None] = lambda text: None) -> None:
        """Connects, and finds or makes the experiment and the pipeline's run."""
        self._target, self._complain = target, complain
        self._client = connect(target.uri, target.database)
        self._experiment = self._find_experiment()
        found = self._adopt()
        self._curves = {curve: _curve(run) for curve, run in found.items() if curve}
        self._parent = found[""].info.run_id if "" in found else self._create_parent()
        self._client.update_run(self._parent, status="RUNNING")
        self._owes_pipeline = self._is_new(found.get(""))

    def sync(self, stage: StageDir) -> None:
        for attempts in curves(stage):
            self._sync_curve(stage, attempts)
        if self._owes_pipeline:  # last, for what cannot be stored must not hold back what can
            self._store_pipeline()

    def run_id(self, curve: str) -> str | None:
        known = self._curves.get(curve)
        return known.run_id if known else None

    def finish(self, status: str) -> None:
        self._adopt({self._parent, *(curve.run_id for curve in self._curves.values())})  # requests that came late
        self._client.set_terminated(self._parent, status)

    # ------------------------------------------------------------------ runs

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._target.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=self._target.artifacts))
            except MlflowException:  # made by another process since we looked
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise MlflowException(f"experiment '{name}' is deleted in MLflow; restore it or set tracking.experiment")
        return str(experiment.experiment_id)

    def _adopt(self, known: Collection[str] = ()) -> dict[str, "Run"]:
        """Runs by their curve. A request whose answer was lost may have made a second one: one of `known` ids stays, or
        else the fuller."""
        found: dict[str, Run] = {}
        ours = f"tags.`opdctl.pipeline_run` = '{self._target.pipeline_run}'"
        runs = list(search_runs(self._client, [self._experiment], ours))
        for run in sorted(runs, key=lambda run: (run.info.run_id not in known, -run.data.metrics.get(MARKER, -1))):
            curve = run.data.tags.get("opdctl.curve", "")
            if curve in found:
                self._client.delete_run(run.info.run_id)
            else:
                found[curve] = run
        return found

    def _tags(self) -> dict[str, str]:
        target = self._target
        return {
            "opdctl.pipeline_run": target.pipeline_run,
            "opdctl.pipeline": target.pipeline,
            "opdctl.run": target.run,
            "run": target.run,
            "mlflow.user": getpass.getuser(),
            "mlflow.source.name": "opdctl",
        }

    def _create_parent(self) -> str:
        run = self._client.create_run(self._experiment, tags=self._tags(), run_name=self._target.run)
        return str(run.info.run_id)

    def _is_new(self, parent: "Run | None") -> bool:
        return parent is None or parent.data.tags.get("opdctl.pipeline_digest") != self._digest()

    def _digest(self) -> str:
        return sha256(json.dumps(self._target.resolved, sort_keys=True, default=str).encode()).hexdigest()

    def _store_pipeline(self) -> None:
        resolved = dict(self._target.resolved)
        store = partial(self._client.log_dict, self._parent, resolved, "pipeline.yaml")
        self._store(self._parent, "pipeline.yaml", store)
        self._client.set_tag(self._parent, "opdctl.pipeline_digest", self._digest())
        self._owes_pipeline = False

    def _create_child(self, entry: Entry) -> Curve:
        labels = {safe_name(name): value for name, value in entry.labels.items()}
        tags = labels | {
            **self._tags(),
            "mlflow.parentRunId": self._parent,
            "opdctl.curve": entry.curve,
            "stage": entry.stage,
            "kind": entry.kind,
            "opdctl.fingerprint": entry.fingerprint,
        }
        run = self._client.create_run(self._experiment, start_time=_ms(entry.started), tags=tags, run_name=entry.stage)
        return Curve(run.info.run_id, -1, "")

    # ------------------------------------------------------------------ a stage's curve

    def _sync_curve(self, stage: StageDir, attempts: list[tuple[Attempt, Entry]]) -> None:
        last = attempts[-1][1]
        curve = self._curves.get(last.curve)
        if curve is None:
            curve = self._curves[last.curve] = self._create_child(attempts[0][1])
        if curve.closed == _closing(last):
            return
        if curve.attempt != last.attempt:
            self._announce(curve, last)
        for attempt, entry in attempts:
            for events in curve.tails.setdefault(entry.attempt, EventTail(attempt.events)).parts():
                self._log_events(curve, events)
        for attempt, entry in attempts:
            self._tell_guards(curve, attempt, entry)
        if curve.owed:
            self._store_settings(curve, last)
        if last.ended is not None:
            self._close(stage, curve, last, last.ended)

    def _announce(self, curve: Curve, entry: Entry) -> None:
        """A new attempt, or the first look at a curve that another process began."""
        client, run_id = self._client, curve.run_id
        client.update_run(run_id, status="RUNNING")
        run = client.get_run(run_id)
        tags = {"opdctl.attempt": str(entry.attempt), "opdctl.closed": ""}
        params = flatten_params(entry.settings) | {"fingerprint": entry.fingerprint}
        for key, value in params.items():
            if run.data.params.get(key, value) != value:  # a grown budget: MLflow's params never change
                tags[fit(f"changed.{key}")] = cut(value, LONGEST_TAG)
        self._log_params(curve, [(key, value) for key, value in params.items() if key not in run.data.params])
        self._link_inputs(run, entry)
        self._log_tags(curve, tags | {fit(f"input.{role}"): text for role, text in _describe(entry.parents).items()})
        curve.attempt, curve.closed, curve.owed = entry.attempt, "", True

    def _log_params(self, curve: Curve, params: list[tuple[str, str]]) -> None:
        from mlflow.entities import Param

        for start in range(0, len(params), PARAMS):
            chunk = [Param(key, value) for key, value in params[start : start + PARAMS]]
            self._send(curve, chunk, lambda given: self._client.log_batch(curve.run_id, params=given))

    def _log_tags(self, curve: Curve, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        told = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, len(told), PARAMS):
            chunk = told[start : start + PARAMS]
            self._send(curve, chunk, lambda given: self._client.log_batch(curve.run_id, tags=given))

    def _log_events(self, curve: Curve, events: Iterable[Event]) -> None:
        """Those that MLflow does not have. An event is never split over requests unless it is larger than one."""
        from mlflow.entities import Metric

        waiting: list[Metric] = []
        notes: dict[str, str] = {}
        for event in events:
            if not event.metrics or event.step <= curve.cursor:
                continue
            flat = flatten_metrics(event.metrics)
            numbers = flat.numbers | {MARKER: float(event.step)}  # the marker last
            metrics = [Metric(key, value, _ms(event.time), event.step) for key, value in numbers.items()]
            notes |= _notes(flat)
            if len(waiting) + len(metrics) > BATCH:
                self._log_metrics(curve, waiting)
                waiting = []
            waiting += metrics
            curve.cursor = event.step
        self._log_metrics(curve, waiting)
        self._log_tags(curve, notes)

    def _log_metrics(self, curve: Curve, metrics: list["Metric"]) -> None:
        for start in range(0, len(metrics), BATCH):
            chunk = metrics[start : start + BATCH]
            self._send(curve, chunk, lambda given: self._client.log_batch(curve.run_id, metrics=given))

    def _tell_guards(self, curve: Curve, attempt: Attempt, entry: Entry) -> None:
        """What the gate and the watchdog found, whenever there is more of it."""
        state = guards.state(attempt)
        if not any(state) or curve.guarded.get(entry.attempt) == state:
            return
        self._log_tags(curve, guards.tags(attempt))
        for path in guards.files(attempt):
            self._store(curve.run_id, path.name, partial(self._client.log_artifact, curve.run_id, str(path)))
        curve.guarded[entry.attempt] = state

    # ------------------------------------------------------------------ what MLflow would not take

    def _send(self, curve: Curve, items: list[Any], log: Callable[[list[Any]], object]) -> None:
        self._leave_out(curve.run_id, send(self._client, curve.run_id, items, log))

    def _store(self, run_id: str, name: str, store: Callable[[], object]) -> None:
        """A file. Where the server lives and its files' store does not, metrics and models are told without."""
        try:
            with asking():
                store()
        except Unreachable as error:
            if error.away:
                raise
            probe(self._client, run_id)
            self._leave_out(run_id, [f"{name}: {error}"])

    def _leave_out(self, run_id: str, lines: list[str]) -> None:
        if lines:
            text = "; ".join(lines)
            self._client.set_tag(run_id, "opdctl.left_out", cut(text, LONGEST_TAG))
            self._complain(
                f"tracking: MLflow at {redact(self._target.uri)} does not take {cut(text, 300)}; it stays on disk"
            )

    def _store_settings(self, curve: Curve, entry: Entry) -> None:
        whole = {"stage": entry.stage, "kind": entry.kind, **entry.settings}
        self._store(curve.run_id, "stage.yaml", partial(self._client.log_dict, curve.run_id, whole, "stage.yaml"))
        curve.owed = False

    # ------------------------------------------------------------------ the end of a curve

    def _close(self, stage: StageDir, curve: Curve, entry: Entry, ending: Ending) -> None:
        client, run_id = self._client, curve.run_id
        if ending.published is not None:
            self._log_published(curve, entry, ending, ending.published)
        if ending.message:
            client.set_tag(run_id, "opdctl.message", cut(ending.message, LONGEST_TAG))
        client.set_terminated(run_id, ending.status, _ms(ending.time))
        client.set_tag(run_id, "opdctl.closed", _closing(entry))
        curve.closed = _closing(entry)

    def _log_published(self, curve: Curve, entry: Entry, ending: Ending, published: Published) -> None:
        from mlflow.entities import LoggedModelOutput, Metric

        client, run_id = self._client, curve.run_id
        run = client.get_run(run_id)
        flat = flatten_metrics(published.metrics)
        final = {key: value for key, value in flat.numbers.items() if key not in run.data.metrics}
        self._log_metrics(curve, [Metric(key, value, _ms(ending.time), published.step) for key, value in final.items()])
        self._log_tags(curve, {"opdctl.record": published.record_id} | _notes(flat))
        for report in (Path(published.folder) / name for name in REPORTS):
            if report.exists():
                self._store(run_id, report.name, partial(client.log_artifact, run_id, str(report)))
        if any(name.endswith(".safetensors") for name in published.digests):
            model = self._model(published.record_id) or self._create_model(run_id, entry, published)
            known = run.outputs.model_outputs if run.outputs else []
            if model not in {output.model_id for output in known}:
                client.log_outputs(run_id, [LoggedModelOutput(model, published.step)])

    def _create_model(self, run_id: str, entry: Entry, published: Published) -> str:
        weights = {name: digest for name, digest in published.digests.items() if name.endswith(".safetensors")}
        parents = [parent.record_id or parent.ref for parent in entry.parents]
        tags = {
            **{safe_name(name): value for name, value in entry.labels.items()},
            "mlflow.model.isExternal": "true",
            "stage": entry.stage,
            "kind": entry.kind,
            "run": self._target.run,
            "opdctl.pipeline_run": self._target.pipeline_run,
            "opdctl.record": published.record_id,
            "opdctl.fingerprint": entry.fingerprint,
            "opdctl.parents": cut(json.dumps(parents), LONGEST_TAG),
            "opdctl.path": cut(published.folder, LONGEST_TAG),
            "opdctl.sha256": cut(json.dumps(weights), LONGEST_TAG),
        }
        name = "".join("-" if letter in "/:.%\"'" else letter for letter in f"{self._target.run} {entry.stage}")
        params = {"stage": entry.stage, "kind": entry.kind, "step": str(published.step)}
        model = self._client.create_logged_model(
            self._experiment, name=name, source_run_id=run_id, tags=tags, params=params, model_type=entry.kind
        )
        self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _model(self, record_id: str) -> str | None:
        """The LoggedModel of a checkpoint: of several, which lost answers made, the first, and it is finalized."""
        found = self._client.search_logged_models(
            [self._experiment], filter_string=f"tags.`opdctl.record` = '{record_id}'"
        )
        if not found:
            return None
        first, *others = sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))
        if str(first.status) != "READY":
            self._client.finalize_logged_model(first.model_id, "READY")
        for other in others:
            self._client.delete_logged_model(other.model_id)
        return str(first.model_id)

    def _link_inputs(self, run: "Run", entry: Entry) -> None:
        """The data and the parents' models as inputs of the run; parents from elsewhere are in the tags only."""
        from mlflow.entities import Dataset, DatasetInput, LoggedModelInput

        inputs = run.inputs
        known = {model.model_id for model in inputs.model_inputs} if inputs else set()
        records = [parent.record_id for parent in entry.parents if parent.record_id]
        models = [model for record in dict.fromkeys(records) if (model := self._model(record)) and model not in known]
        if models:
            self._client.log_inputs(run.info.run_id, models=[LoggedModelInput(model) for model in models])
        if not (inputs and inputs.dataset_inputs):
            data = [DatasetInput(Dataset(name, digest[:36], "opdctl", name)) for name, digest in entry.data.items()]
            if data:
                self._client.log_inputs(run.info.run_id, datasets=data)


def _curve(run: "Run") -> Curve:
    cursor = int(run.data.metrics.get(MARKER, -1))
    return Curve(run.info.run_id, cursor, run.data.tags.get("opdctl.closed", ""))


def _notes(flat: Flat) -> dict[str, str]:
    """Texts among numbers, and names that were too long for a key."""
    notes = {fit(f"text.{key}"): text for key, text in flat.texts.items()}
    return notes | {f"name.{key[-12:]}": cut(name, LONGEST_TAG) for key, name in flat.names.items()}


def _closing(entry: Entry) -> str:
    return f"{entry.attempt} {entry.ended.status}" if entry.ended else "open"


def _describe(parents: Iterable[Parent]) -> dict[str, str]:
    by_role: dict[str, list[str]] = {}
    for parent in parents:
        by_role.setdefault(parent.role, []).append(f"{parent.label} ({parent.record_id or parent.ref})")
    return {role: cut(", ".join(texts), LONGEST_TAG) for role, texts in by_role.items()}


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
