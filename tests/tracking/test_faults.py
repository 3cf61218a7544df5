"""Whatever a tracking server or its database do: training goes on, and MLflow has every point once, in order, later."""

import errno
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import toy
from tracking.proxy import Proxy, mlflow_server

from opdctl import runner, tracking
from opdctl.repair import repair
from opdctl.store import Workspace
from opdctl.tracking import names
from opdctl.tracking.server import connect, end_stale
from opdctl.verdicts import Outcome, Verdict, write_verdicts

# MLflow's own use of its libraries is not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory) -> Path:
    """A database that is set up: that takes seconds, so it is done once and copied."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{database}", database)
    return database


@pytest.fixture(scope="module")
def server(empty_store, tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("server"), empty_store) as port:
        yield port


@pytest.fixture
def proxy(server):
    made = Proxy(server)
    yield made
    made.heal()
    made.close()


@pytest.fixture
def own(workspace, empty_store) -> Path:
    """The workspace's own database."""
    return Path(shutil.copy(empty_store, workspace / "mlflow.db"))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What users wait for in seconds, tests wait for in tenths."""
    monkeypatch.setattr(runner, "DRAIN_S", 0.5)
    monkeypatch.setattr(tracking, "EVERY_S", 0.05)
    monkeypatch.setattr(tracking, "RETRY_S", (0.05,))
    yield
    end_threads()


def end_threads():
    """A process would have ended with its orchestrator; this one goes on."""
    for thread in threading.enumerate():
        if thread.name == "tracking":
            thread.join(timeout=120)


def pipeline(uri=None, experiment="e", **more):
    """A stage that fails once, so that a curve is made of two attempts, and one that reads it."""
    stages = {
        "sft": toy.sft(steps=6, task="faulty"),
        "odd": toy.sft("stage:sft", steps=3, task="odd"),
    }
    knobs = {"faulty": {"crash_at": 5}, "odd": {"odd_values": 1}}
    told = {"enabled": True, "experiment": experiment} | ({"uri": uri} if uri else {})
    return toy.pipeline(stages, knobs=knobs, tracking=told, **more)


def mend(workspace):
    place = Workspace(workspace)
    return list(repair(place, [place.run("r")]))


def reported(stage):
    """(name, step, value) of every number in events.jsonl, a step that was seen again left out, in order."""
    points, last = [], -1
    for attempt in stage.attempts():
        for line in attempt.events.read_text().splitlines():
            event = json.loads(line)
            if event["metrics"] and event["step"] > last:
                last = event["step"]
                numbers = names.flatten_metrics(event["metrics"]).numbers
                points += [(name, last, value) for name, value in numbers.items()]
    return points


def assert_told(uri, wanted, experiment="e", times=1):
    """MLflow has what the disk says: every point once, in order, one run a stage, all ended."""
    client = connect(uri, None)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=1000)
    assert len(found) == times * (1 + len(wanted.stages))
    assert {run.info.status for run in found} == {"FINISHED"}
    models = client.search_logged_models([client.get_experiment_by_name(experiment).experiment_id])
    assert sorted(model.tags["stage"] for model in models) == sorted(wanted.stages)
    assert {str(model.status) for model in models} == {"READY"}
    for run in found:
        if (stage := run.data.tags.get("stage")) is None:
            continue
        expected = reported(toy.stage(wanted, stage))
        assert len(expected) > 5
        final = {name for name, *_ in expected} | {"step"}
        assert run.data.metrics.keys() == final
        for name in final - {"step"}:
            history = client.get_metric_history(run.info.run_id, name)
            assert [(name, point.step, point.value) for point in history] == [p for p in expected if p[0] == name]


@pytest.mark.parametrize("trouble", ["down", "503", "429", "500", "silent", "slow"])
def test_training_ends_as_soon_as_without_and_all_is_told_later_once(workspace, proxy, monkeypatch, trouble):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    if trouble == "slow":
        proxy.delay_s = 5.0
    else:
        proxy.mode = trouble
    spent = []
    for name in ("started", "ended", "run_id", "complaints"):
        monkeypatch.setattr(tracking.Tracker, name, timed(getattr(tracking.Tracker, name), spent))
    wanted, notes = pipeline(proxy.uri, trouble), toy.Notes()
    assert "sft" in toy.run(wanted).failed
    end_threads()
    began = time.monotonic()
    assert toy.run(wanted, reporter=notes).done == ["sft", "odd"]
    last = toy.stage(wanted, "odd").attempts()[-1].events.stat().st_mtime
    assert time.time() - last < time.monotonic() - began
    assert max(spent) < 2.0, "the runner waited for the server"
    assert "not yet in MLflow" in notes.of("message")[-1][0]
    assert "opdctl repair r" in notes.of("message")[-1][0]
    end_threads()
    proxy.heal()
    mend(workspace)
    assert mend(workspace) == []
    assert_told(proxy.uri, wanted, trouble)


def timed(real, spent):
    def call(*args, **kwargs):
        began = time.monotonic()
        try:
            return real(*args, **kwargs)
        finally:
            spent.append(time.monotonic() - began)

    return call


def test_an_answer_that_is_cut_anywhere_doubles_nothing(workspace, proxy):
    """What it asked for was done, and nobody knows: so it is looked up before it is done again."""
    wanted = pipeline(proxy.uri, "cut")
    proxy.mode = "down"
    toy.run(wanted)
    toy.run(wanted)
    end_threads()
    proxy.heal()
    run = Workspace(workspace).run("r")
    left = tracking.left(run)
    before = proxy.answers
    assert left.tell(wait_s=300) == ""
    needed = proxy.answers - before
    assert_told(proxy.uri, wanted, "cut")
    assert needed > 20
    for at in range(0, needed, needed // 5):
        experiment = f"cut-{at}"
        run.write_info(tracking={"id": f"again{at}", "pending": True})
        run.write_pipeline({**run.read_pipeline(), "tracking": {"uri": proxy.uri, "experiment": experiment}})
        proxy.cut = {proxy.answers + at}
        for _ in range(3):
            if tracking.left(run) is not None:
                tracking.left(run).tell(wait_s=300)
        assert tracking.left(run) is None
        assert_told(proxy.uri, wanted, experiment)


def test_a_locked_database_delays_nothing_and_is_told_later(workspace, own):
    wanted, notes = pipeline(), toy.Notes()
    with sqlite3.connect(own, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        toy.run(wanted)
        assert toy.run(wanted, reporter=notes).done == ["sft", "odd"]
        assert "not yet in MLflow" in notes.of("message")[-1][0]
        other.execute("COMMIT")
    other.close()
    end_threads()
    mend(workspace)
    assert_told(f"sqlite:///{own}", wanted)
    assert mend(workspace) == []


def test_a_database_that_is_read_only_or_none_at_all_stops_nothing(workspace, own):
    read_only = f"sqlite:///file:{own}?mode=ro&uri=true"
    for uri in (read_only, None):
        wanted, notes = pipeline(uri, name="p"), toy.Notes()
        if uri is None:
            own.write_bytes(b"no database " * 1000)
        toy.run(wanted)
        assert toy.run(wanted, reporter=notes, rerun=["odd"]).done == ["sft", "odd"]
        assert "does not answer as it should" in notes.of("message")[0][0]
    found = mend(workspace)
    assert {one.state for one in found} == {"left"}
    assert all(one.told for one in found)
    own.rename(own.with_suffix(".bad"))
    command = [sys.executable, "-m", "opdctl", "repair", "r", "--json"]  # this process has the old file open
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert [one["state"] for one in json.loads(said.stdout)["found"]] == ["mended"]
    client = connect(f"sqlite:///{shutil.copy(own, own.with_suffix('.copy'))}", None)  # MLflow keeps engines by address
    found = client.search_runs([client.get_experiment_by_name("e").experiment_id], "tags.stage = 'sft'")
    assert [run.info.status for run in found] == ["FINISHED"]


def test_one_metric_param_or_tag_that_is_refused_loses_nothing_else(workspace, own, monkeypatch):
    """With names left as they are, MLflow refuses some."""
    monkeypatch.setattr(names, "safe_name", lambda name: name)
    wanted, notes = pipeline(), toy.Notes()
    toy.run(wanted)
    monkeypatch.setattr(runner, "DRAIN_S", 120)
    toy.run(wanted, reporter=notes)
    client = connect(f"sqlite:///{own}", own)
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id], "tags.stage = 'odd'")
    assert {"loss": 3, "nested/deep/x": 3}.keys() <= run.data.metrics.keys()
    assert [point.step for point in client.get_metric_history(run.info.run_id, "nested/deep/x")] == [1, 2, 3]
    assert "acc@1" in run.data.tags["opdctl.left_out"]
    assert run.info.status == "FINISHED"
    assert any("does not take" in text for (text,) in notes.of("message"))


def test_files_that_cannot_be_stored_hold_no_metric_back(workspace, own, monkeypatch):
    monkeypatch.setattr(runner, "DRAIN_S", 120)
    (workspace / "mlartifacts").write_text("a file where the folder should be")
    wanted, notes = pipeline(), toy.Notes()
    toy.run(wanted)
    toy.run(wanted, reporter=notes)
    assert_told(f"sqlite:///{own}", wanted)
    assert any("stage.yaml" in text for (text,) in notes.of("message"))
    assert mend(workspace) == []


def test_verdicts_and_alarms_are_tags_and_files_of_the_stage(workspace, own, monkeypatch):
    monkeypatch.setattr(runner, "DRAIN_S", 120)
    wanted = pipeline()
    toy.run(wanted)
    attempt = toy.stage(wanted, "sft").attempts()[0]
    told = [
        Verdict("vocabulary", "sft -> a", Outcome.GO, "same"),
        Verdict("distance", "sft -> a", Outcome.WARN, "0.3 nats"),
        Verdict("distance", "sft -> b", Outcome.REFUSE, "5 nats", accepted=True),
    ]
    write_verdicts(attempt.gate, "key", told)
    alarm = {"rule": "entropy", "action": "warn", "step": 3, "evidence": "0.1 of the start"}
    attempt.alarms.write_text(json.dumps(alarm) + '\n{"rule": "cut by a ki')
    toy.run(wanted)
    client = connect(f"sqlite:///{own}", own)
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id], "tags.stage = 'sft'")
    assert run.data.tags["gate"] == "accepted, refuse"
    assert run.data.tags["gate.distance"] == "sft -> a: warn: 0.3 nats\nsft -> b: accepted, refuse: 5 nats"
    assert "gate.vocabulary" not in run.data.tags
    assert (run.data.tags["watch"], run.data.tags["watch.entropy"]) == ("1", "warn at step 3: 0.1 of the start")
    assert {"gate.json", "alarms.jsonl"} <= {file.path for file in client.list_artifacts(run.info.run_id)}


def test_of_two_runs_for_one_curve_the_fuller_stays(workspace, own, monkeypatch):
    """A request that a proxy repeats makes a second run."""
    monkeypatch.setattr(runner, "DRAIN_S", 120)
    wanted = pipeline()
    toy.run(wanted)
    client = connect(f"sqlite:///{own}", own)
    experiment = client.get_experiment_by_name("e").experiment_id
    for run in client.search_runs([experiment]):
        client.create_run(experiment, tags={k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")})
    toy.run(wanted)
    assert_told(f"sqlite:///{own}", wanted)


class Foreign(Exception):
    """As the libraries of artifact stores raise, that MLflow passes through as it is."""


def test_an_error_of_a_kind_that_nobody_foresaw_ends_neither_training_nor_telling(workspace, own, monkeypatch):
    """Between two stages: a thread that had died could not be started again."""
    monkeypatch.setattr(runner, "DRAIN_S", 120)
    wanted, notes = (
        toy.pipeline(
            {"sft": toy.sft(), "odd": toy.sft("stage:sft", steps=3)}, tracking={"enabled": True, "experiment": "e"}
        ),
        toy.Notes(),
    )
    given = []

    def failing(*of):
        given.append(of)
        if len(given) == 1:
            raise Foreign("an endpoint of its own kind\nand more")
        return connect(*of)

    monkeypatch.setattr("opdctl.tracking.writer.connect", failing)
    assert toy.run(wanted, reporter=notes).done == ["sft", "odd"]
    assert any("does not answer as it should (an endpoint of its own kind)" in text for (text,) in notes.of("message"))
    client = connect(f"sqlite:///{own}", own)
    found = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert {run.info.status for run in found} == {"FINISHED"}
    assert len(found) == 3


def test_a_store_of_files_that_fails_in_its_own_way_holds_no_metric_back(workspace, own, monkeypatch):
    monkeypatch.setattr(runner, "DRAIN_S", 120)

    def failing(*of):
        raise Foreign("upload failed")

    monkeypatch.setattr("mlflow.MlflowClient.log_dict", failing)
    wanted, notes = pipeline(), toy.Notes()
    toy.run(wanted)
    toy.run(wanted, reporter=notes)
    assert_told(f"sqlite:///{own}", wanted)
    assert any("does not take stage.yaml: upload failed" in text for (text,) in notes.of("message"))


def test_a_stage_whose_worker_could_not_be_started_does_not_run_in_mlflow(workspace, own, monkeypatch):
    def full(*of):
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(runner, "DRAIN_S", 120)
    monkeypatch.setattr("opdctl.supervisor.forkserver.ensure_running", full)
    wanted = toy.pipeline({"sft": toy.sft()}, tracking={"enabled": True, "experiment": "e"})
    assert "no more processes" in toy.run(wanted).failed["sft"]
    client = connect(f"sqlite:///{own}", own)
    found = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert [run.info.status for run in found] == ["FAILED", "FAILED"]


def test_a_run_that_begins_while_stale_ones_are_looked_for_lives(workspace, own):
    client = connect(f"sqlite:///{own}", own)
    experiment = client.create_experiment("e")
    for number in ("1", "2"):
        client.create_run(experiment, tags={"opdctl.pipeline_run": number, "opdctl.run": number})
    asked = []

    class Watched:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(client, name)

    def living():
        assert "search_runs" in asked
        return {"2"}

    assert end_stale(Watched(), living) == ["1"]
    assert sorted(run.info.status for run in client.search_runs([experiment])) == ["KILLED", "RUNNING"]
