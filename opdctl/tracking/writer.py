"""Brings MLflow to what the disk says. Every call can be repeated, after an error or by a later process.

Nothing is found again by memory: runs by their tags, the end of a curve by the `step` metric in MLflow itself,
models by their record's id. So a call whose answer was lost does not double anything.
"""

import fcntl
import getpass
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail
from opdctl.records import SELECTION, Parent
from opdctl.store import Attempt, StageDir
from opdctl.tracking.journal import Ending, Entry, Published, curves
from opdctl.tracking.names import LONGEST_TAG, cut, flatten_metrics, flatten_params, safe_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

MARKER = "step"  # logged with every event: its last value in MLflow is the end of what is there
BATCH = 900  # metrics in one request; MLflow takes 1000 of all things together
PARAMS = 100  # in one request, MLflow's limit
REPORTS = ("report.json", SELECTION)

# Only where the user has not said otherwise. A server that is down is tried again later, by us.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class Target:
    """Where a pipeline run is tracked."""

    uri: str
    database: Path | None  # the workspace's own SQLite file, if that is what `uri` is
    artifacts: str | None  # where a new experiment keeps artifacts; None: where the server wants them
    experiment: str
    pipeline: str
    run: str
    pipeline_run: str  # unique id of this pipeline run
    resolved: Mapping[str, Any]


@dataclass
class Curve:
    """One MLflow run of a stage, as far as this process knows it."""

    run_id: str
    cursor: int  # last step that MLflow has
    closed: str  # value of the tag `opdctl.closed`
    tails: dict[int, EventTail] = field(default_factory=dict)  # attempt -> its events
    attempt: int = 0  # last attempt that was announced


class Writer:
    def __init__(self, target: Target) -> None:
        """Connects, and finds or makes the experiment and the pipeline's run."""
        self._target = target
        self._client = connect(target)
        self._experiment = self._find_experiment()
        found = {run.data.tags.get("opdctl.curve", ""): run for run in self._search_runs()}
        self._curves = {curve: _curve(run) for curve, run in found.items() if curve}
        self._parent = found[""].info.run_id if "" in found else self._create_parent()
        self._client.update_run(self._parent, status="RUNNING")

    def sync(self, stage: StageDir) -> None:
        for attempts in curves(stage):
            self._sync_curve(stage, attempts)

    def run_id(self, curve: str) -> str | None:
        known = self._curves.get(curve)
        return known.run_id if known else None

    def finish(self, status: str) -> None:
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

    def _search_runs(self) -> list["Run"]:
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment],
                f"tags.`opdctl.pipeline_run` = '{self._target.pipeline_run}'",
                max_results=1000,
                page_token=token,
            )
            found += page
            if not (token := page.token):
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
        self._client.log_dict(run.info.run_id, dict(self._target.resolved), "pipeline.yaml")
        return str(run.info.run_id)

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
            tail = curve.tails.setdefault(entry.attempt, EventTail(attempt.events))
            self._log_events(curve, tail.read())
        if last.ended is not None:
            self._close(stage, curve, last, last.ended)

    def _announce(self, curve: Curve, entry: Entry) -> None:
        """A new attempt, or the first look at a curve that another process began."""
        from mlflow.entities import RunTag

        client, run_id = self._client, curve.run_id
        client.update_run(run_id, status="RUNNING")
        run = client.get_run(run_id)
        tags = {"opdctl.attempt": str(entry.attempt), "opdctl.closed": ""}
        params = flatten_params(entry.settings) | {"fingerprint": entry.fingerprint}
        for key, value in params.items():
            if run.data.params.get(key, value) != value:  # a grown budget: MLflow's params never change
                tags[f"changed.{key}"[:250]] = cut(value, LONGEST_TAG)
        new = [(key, value) for key, value in params.items() if key not in run.data.params]
        self._log_params(run_id, new)
        client.log_dict(run_id, {"stage": entry.stage, "kind": entry.kind, **entry.settings}, "stage.yaml")
        self._link_inputs(run, entry)
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        curve.attempt, curve.closed = entry.attempt, ""

    def _log_params(self, run_id: str, params: list[tuple[str, str]]) -> None:
        from mlflow.entities import Param

        for start in range(0, len(params), PARAMS):
            chunk = [Param(key, value) for key, value in params[start : start + PARAMS]]
            self._client.log_batch(run_id, params=chunk)

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
            notes |= {f"text.{key}"[:250]: text for key, text in flat.texts.items()}
            if flat.not_finite:
                notes["opdctl.not_finite"] = cut(f"step {event.step}: {', '.join(flat.not_finite)}", LONGEST_TAG)
            if len(waiting) + len(metrics) > BATCH:
                self._send(curve, waiting)
                waiting = []
            waiting += metrics
            curve.cursor = event.step
        self._send(curve, waiting)
        for key, value in notes.items():
            self._client.set_tag(curve.run_id, key, value)

    def _send(self, curve: Curve, metrics: list["Metric"]) -> None:
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(curve.run_id, metrics=metrics[start : start + BATCH])

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
        final = {k: v for k, v in flatten_metrics(published.metrics).numbers.items() if k not in run.data.metrics}
        self._send(curve, [Metric(key, value, _ms(ending.time), published.step) for key, value in final.items()])
        client.set_tag(run_id, "opdctl.record", published.record_id)
        for report in (Path(published.folder) / name for name in REPORTS):
            if report.exists():
                client.log_artifact(run_id, str(report))
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
        """The LoggedModel of a checkpoint."""
        found = self._client.search_logged_models(
            [self._experiment], filter_string=f"tags.`opdctl.record` = '{record_id}'", max_results=1
        )
        return str(found[0].model_id) if found else None

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
        tags = {f"input.{role}"[:250]: text for role, text in _describe(entry.parents).items()}
        for key, value in tags.items():
            self._client.set_tag(run.info.run_id, key, value)


def connect(target: Target) -> "MlflowClient":
    """A client that works; a new SQLite store is set up by one process at a time, for two at once break it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    if target.database is None:
        return MlflowClient(tracking_uri=target.uri)
    with open(target.database.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        client = MlflowClient(tracking_uri=target.uri)
        client.search_experiments(max_results=1)
        return client


def _curve(run: "Run") -> Curve:
    cursor = int(run.data.metrics.get(MARKER, -1))
    return Curve(run.info.run_id, cursor, run.data.tags.get("opdctl.closed", ""))


def _closing(entry: Entry) -> str:
    return f"{entry.attempt} {entry.ended.status}" if entry.ended else "open"


def _describe(parents: Iterable[Parent]) -> dict[str, str]:
    by_role: dict[str, list[str]] = {}
    for parent in parents:
        by_role.setdefault(parent.role, []).append(f"{parent.label} ({parent.record_id or parent.ref})")
    return {role: cut(", ".join(texts), LONGEST_TAG) for role, texts in by_role.items()}


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
