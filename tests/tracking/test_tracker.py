import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy
from mlflow import MlflowClient

from opdctl.tracking.names import safe_name
from opdctl.tracking.server import connect

# MLflow's own use of its libraries is not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
ON = {"tracking": {"enabled": True}}


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory) -> Path:
    """A database that is set up: that takes seconds, so it is done once and copied."""
    folder = tmp_path_factory.mktemp("store")
    connect(f"sqlite:///{folder / 'mlflow.db'}", folder / "mlflow.db")
    return folder / "mlflow.db"


@pytest.fixture
def tracked(workspace, empty_store) -> Path:
    """A workspace with a database."""
    shutil.copy(empty_store, workspace / "mlflow.db")
    return workspace


class Store:
    """What MLflow has, by stage."""

    def __init__(self, uri: str | Path, experiment="toy") -> None:
        self.client = MlflowClient(uri if isinstance(uri, str) else f"sqlite:///{uri / 'mlflow.db'}")
        self.experiment = self.client.get_experiment_by_name(experiment).experiment_id

    def runs(self, stage: str | None = None):
        """Oldest first; the pipeline's own for None."""
        found = self.client.search_runs([self.experiment], order_by=["attributes.start_time ASC"])
        return [self.client.get_run(run.info.run_id) for run in found if run.data.tags.get("stage") == stage]

    def run(self, stage: str | None = None):
        [found] = self.runs(stage)
        return found

    def steps(self, stage: str, metric="loss") -> list[int]:
        return [point.step for point in self.client.get_metric_history(self.run(stage).info.run_id, metric)]

    def model(self, stage: str):
        [found] = self.client.search_logged_models([self.experiment], filter_string=f"tags.stage = '{stage}'")
        return found


def test_a_pipeline_run_is_one_run_with_a_child_for_each_stage(tracked):
    stages = {
        "sft": toy.sft(),
        "max": toy.sft("stage:sft", foreach={"domain": ["general"]}, labels={"effort": "max"}),
        "eval": toy.evaluation("stage:sft", "stage:max[*]"),
    }
    toy.run(toy.pipeline(stages, axes={"domain": ["general"]}, **ON))
    store = Store(tracked)
    parent, child = store.run(), store.run("max[domain=general]")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {run.info.status for run in (parent, child, store.run("sft"), store.run("eval"))} == {"FINISHED"}
    told = {"kind": "sft", "domain": "general", "effort": "max", "run": "r", "opdctl.run": "r", "opdctl.attempt": "1"}
    assert told.items() <= child.data.tags.items()
    assert child.data.tags["opdctl.pipeline_run"] == parent.data.tags["opdctl.pipeline_run"]
    assert child.data.params["config.train.optimizer.lr"] == "0.1"
    assert store.steps("max[domain=general]") == [1, 2, 3, 4]


def test_checkpoints_are_models_linked_to_their_run_and_their_parents(tracked):
    wanted = toy.pipeline({"sft": toy.sft(), "a": toy.sft("stage:sft")}, **ON)
    toy.run(wanted)
    store, record = Store(tracked), toy.stage(wanted, "a").record()
    parent, model = store.model("sft"), store.model("a")
    assert model.source_run_id == store.run("a").info.run_id
    assert str(model.status) == "READY"
    assert model.tags["opdctl.record"] == record.id
    assert record.files["model.safetensors"]["sha256"] in model.tags["opdctl.sha256"]
    assert toy.stage(wanted, "sft").record().id in model.tags["opdctl.parents"]
    assert [given.model_id for given in store.run("a").inputs.model_inputs] == [parent.model_id]
    assert [made.model_id for made in store.run("a").outputs.model_outputs] == [model.model_id]


def test_an_evaluation_leaves_its_numbers_and_its_report(tracked):
    toy.run(toy.pipeline({"sft": toy.sft(), "eval": toy.evaluation("stage:sft")}, **ON))
    store = Store(tracked)
    run = store.run("eval")
    assert run.data.metrics.keys() == {"step", "accuracy", "sft/math/accuracy"}
    assert "report.json" in [file.path for file in store.client.list_artifacts(run.info.run_id)]


def test_odd_metrics_lose_nothing_and_stop_nothing(tracked):
    wanted = toy.pipeline({"sft": toy.sft(task="odd")}, knobs={"odd": {"odd_values": 1}}, **ON)
    notes = toy.Notes()
    assert toy.run(wanted, reporter=notes).done == ["sft"]
    run = Store(tracked).run("sft")
    assert {"loss": 1, "nested/deep/x": 4, "flag": 1, "a/:_/b/:2e./c": 1}.keys() <= run.data.metrics.keys()
    assert run.data.metrics["max domain:general effort:low/acc:401"] == 0.5
    assert run.data.metrics[safe_name("n" * 400)] == 2.0
    assert [run.data.metrics[f"not_finite/{name}"] for name in ("inf", "nan", "huge")] == [1.0, 0.0, 1.0]
    assert run.data.tags["text.text"] == "words among numbers"
    assert run.data.tags["text.long"].startswith("xxx")
    assert notes.of("message") == []


def test_a_killed_worker_leaves_no_mlflow_run_running_or_finished(tracked):
    wanted = toy.pipeline({"sft": toy.sft(task="faulty")}, knobs={"faulty": {"kill_at": 3}}, **ON)
    toy.run(wanted)
    assert Store(tracked).run("sft").info.status == "KILLED"
    assert Store(tracked).run().info.status == "FAILED"
    assert toy.run(wanted).done == ["sft"]
    assert Store(tracked).run("sft").info.status == "FINISHED"


def test_two_attempts_are_one_curve_without_doubled_points(tracked):
    wanted = toy.pipeline({"sft": toy.sft(steps=6, task="faulty")}, knobs={"faulty": {"crash_at": 5}}, **ON)
    toy.run(wanted)
    failed = Store(tracked).run("sft")
    assert failed.info.status == "FAILED"
    assert "ZeroDivisionError" in failed.data.tags["opdctl.message"]
    assert Store(tracked).run().info.status == "FAILED"
    toy.run(wanted)
    store = Store(tracked)
    assert store.steps("sft") == [1, 2, 3, 4, 5, 6]
    assert store.run("sft").info.status == "FINISHED"
    assert store.run("sft").data.tags["opdctl.attempt"] == "2"
    assert store.run().info.status == "FINISHED"


def test_a_stage_trained_again_with_other_settings_is_another_run(tracked):
    toy.run(toy.pipeline({"sft": toy.sft()}, **ON))
    toy.run(toy.pipeline({"sft": toy.sft(lr=0.2)}, **ON))
    runs = Store(tracked).runs("sft")
    assert [run.data.params["config.train.optimizer.lr"] for run in runs] == ["0.1", "0.2"]


def test_a_longer_training_goes_on_in_the_same_run(tracked):
    def wanted(steps, knob):
        stage = toy.sft(steps=steps, task="faulty")
        stage["config"]["train"]["optimizer"]["schedule"] = "constant"
        return toy.pipeline({"sft": stage}, knobs={"faulty": {"crash_at": knob}}, **ON)

    toy.run(wanted(4, 3))
    toy.run(wanted(6, 3))
    store = Store(tracked)
    assert store.steps("sft") == [1, 2, 3, 4, 5, 6]
    assert store.run("sft").data.params["config.train.max_steps"] == "4"
    assert store.run("sft").data.tags["changed.config.train.max_steps"] == "6"


def test_what_a_killed_orchestrator_left_running_is_set_right_by_the_next_run(tracked):
    with subprocess.Popen([sys.executable, toy.__file__, tracked, "tracked"], stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while process.poll() is None and not _any_running(tracked) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    stale = [run for run in Store(tracked).runs("sft") if run.info.status == "RUNNING"]
    wanted = toy.killable(tracked, **ON)
    toy.run(wanted)
    store = Store(tracked)
    assert {run.info.status for stage in (None, *wanted.stages) for run in store.runs(stage)} == {"FINISHED"}
    assert store.steps("sft") == list(range(1, 16))
    assert stale or store.run("sft").info.status == "FINISHED"


def _any_running(workspace: Path) -> bool:
    try:
        store = Store(workspace)
    except AttributeError:  # no experiment yet
        return False
    return any(run.info.status == "RUNNING" for run in store.runs("sft"))


def test_a_run_that_is_only_reused_does_not_load_mlflow(workspace):
    toy.run(toy.killable(workspace))
    code = (
        "import sys, pathlib, toy; wanted = toy.killable(pathlib.Path(sys.argv[1]), tracking={'enabled': True});"
        "print(len(toy.run(wanted).done), 'mlflow' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(toy.__file__).parent)}
    said = subprocess.run([sys.executable, "-c", code, workspace], capture_output=True, text=True, env=environment)
    assert said.stdout.split() == ["5", "False"], said.stderr


def test_eight_stages_at_once_on_a_database_that_does_not_exist_yet_are_all_tracked(workspace):
    stages = {f"s{number}": toy.sft(seed=number) for number in range(8)}
    notes = toy.Notes()
    toy.run(toy.pipeline(stages, machine={"slots": 8, "cpus": 8}, **ON), reporter=notes)
    store = Store(workspace)
    assert [store.steps(stage) for stage in stages] == [[1, 2, 3, 4]] * 8
    assert {store.run(stage).info.status for stage in stages} == {"FINISHED"}
    assert notes.of("message") == []


def test_two_processes_may_set_the_database_up_at_once(tmp_path):
    code = (
        "import sys; from pathlib import Path; from opdctl.tracking.server import connect;"
        "d = Path(sys.argv[1]); connect(f'sqlite:///{d}', d)"
    )
    command = [sys.executable, "-c", code, tmp_path / "mlflow.db"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


@pytest.mark.parametrize("content", ["", '{"stage": "a", "parents"', None])
@pytest.mark.parametrize("told", [True, False])
def test_a_damaged_entry_loses_no_step_and_begins_no_second_curve(tracked, empty_store, content, told):
    """Of a finished stage and of one that goes on; `told`: before it was damaged."""
    stages = {"a": toy.sft(steps=3), "b": toy.sft("stage:a", steps=6, task="faulty")}
    wanted = toy.pipeline(stages, knobs={"faulty": {"crash_at": 5}}, **ON)
    assert "b" in toy.run(wanted).failed
    if not told:
        shutil.copy(empty_store, tracked / "mlflow.db")
        run = toy.stage(wanted, "a").run_dir
        run.write_info(tracking={**run.info["tracking"], "pending": True})
    for name in stages:
        [attempt] = toy.stage(wanted, name).attempts()
        entry = attempt.path / "tracking.json"
        if content is None:
            entry.unlink()
        else:
            entry.write_text(content)
    assert toy.run(wanted).failed == {}
    store = Store(tracked)
    assert (store.steps("a"), store.steps("b")) == ([1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert {store.run(stage).info.status for stage in (None, "a", "b")} == {"FINISHED"}
    assert store.model("a").source_run_id == store.run("a").info.run_id


def test_steps_of_an_attempt_that_could_not_be_noted_are_told_by_the_one_that_goes_on(tracked):
    """As when the disk was full for a moment."""
    stages = {"a": toy.sft(steps=6, task="faulty")}
    off = {"tracking": {"enabled": False}}
    knobs = {"faulty": {"crash_at": 5}}
    assert "a" in toy.run(toy.pipeline(stages, knobs=knobs, **off)).failed
    wanted = toy.pipeline(stages, knobs=knobs, **ON)
    assert toy.run(wanted).done == ["a"]
    store = Store(tracked)
    assert store.steps("a") == [1, 2, 3, 4, 5, 6]
    assert store.run("a").info.status == "FINISHED"
