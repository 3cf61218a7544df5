"""What `status`, `runs`, `logs` and `lineage` say of a run on disk."""

import json
import os
import subprocess
import sys
import time

from opdctl.supervisor import tell_failure
from opdctl.watchdog import Alarm
from opdctl.watchdog.history import note_alarm

MAX = "max[domain=general]"


def test_status_tells_how_far_each_stage_is(call, finished):
    code, out, _ = call("status")
    assert code == 0
    states = {line.split()[0]: line.split()[1] for line in out.split("\n")[2:] if line}
    assert states == {"sft": "done", MAX: "done", "low": "half-trained", "eval": "not"}
    assert "reward 0.500" in out


def test_status_shows_a_damaged_checkpoint(call, finished):
    (finished.stage("sft").checkpoint / "model.safetensors").write_bytes(b"")
    stages = {stage["stage"]: stage for stage in json.loads(call("status", "first", "--json")[1])["stages"]}
    assert stages["sft"]["state"] == "damaged"
    assert "model.safetensors" in stages["sft"]["note"]


def test_status_shows_the_step_of_a_living_worker(call, finished):
    attempt = finished.stage("low").attempts()[-1]
    attempt.note_worker(os.getpid())
    event = {"step": 55, "total": 200, "metrics": {"reward": 0.75}, "phase": "train", "time": 0.0}
    attempt.events.write_text(json.dumps(event) + "\n")
    code, out, _ = call("status")
    assert code == 0
    (line,) = (line for line in out.split("\n") if line.startswith("low"))
    assert line.split()[:3] == ["low", "running", "55/200"]
    assert "working" in out


def test_status_says_why_a_stage_failed_although_state_of_it_is_saved(call, finished):
    error = {"message": "ZeroDivisionError: division by zero", "hint": "the traceback is in the log"}
    (finished.stage("low").attempts()[-1].path / "error.json").write_text(json.dumps(error))
    stages = {stage["stage"]: stage for stage in json.loads(call("status", "first", "--json")[1])["stages"]}
    assert (stages["low"]["state"], stages["low"]["step"]) == ("failed", 40)
    assert "division by zero" in stages["low"]["note"]


def test_status_says_what_came_of_an_attempt_later_than_the_checkpoint(call, finished):
    later = finished.stage("sft").new_attempt()
    (later.path / "error.json").write_text(json.dumps({"message": "the grader broke"}))
    stages = {stage["stage"]: stage for stage in json.loads(call("status", "first", "--json")[1])["stages"]}
    assert (stages["sft"]["state"], stages["sft"]["note"]) == ("done", "attempt 2, later, failed: the grader broke")
    assert stages[MAX]["note"] == ""


def test_status_and_report_tell_the_alarms_of_a_stage(call, finished, workspace):
    alarm = Alarm("truncated", "pause", 40, "97% of the completions are cut", ("too low a limit",), "runbooks/a.md#b")
    note_alarm(finished.stage("low").attempts()[-1], alarm)

    out = " ".join(call("status", "first")[1].split())
    assert "low truncated (pause) at step 40: 97% of the completions are cut; runbooks/a.md#b" in out
    told = json.loads(call("status", "first", "--json")[1])["stages"]
    assert {stage["stage"]: [one["rule"] for one in stage["alarms"]] for stage in told} == {
        "sft": [], "max[domain=general]": [], "low": ["truncated"], "eval": [],
    }  # fmt: skip

    assert call("report", "first", "--out", "page.html")[0] == 0
    page = (workspace / "page.html").read_text()
    assert "97% of the completions are cut" in page
    assert "too low a limit; see runbooks/a.md#b" in page


def test_a_run_is_busy_between_two_workers(call, finished):
    with finished.lock():
        assert json.loads(call("status", "--json")[1])["busy"] is True
        assert json.loads(call("runs", "--json")[1])["runs"][0]["busy"] is True
    assert json.loads(call("status", "--json")[1])["busy"] is False


def test_following_waits_for_a_worker_as_long_as_the_orchestrator_lives(finished, workspace, publish):
    command = [sys.executable, "-m", "opdctl", "logs", "low", "-f"]
    with (
        finished.lock(),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=workspace) as follower,
    ):
        assert follower.stdout.readline() == "low, attempt 2\n"
        time.sleep(1)
        assert follower.poll() is None
        publish(finished, "low", "rlvr", [], {})
        assert follower.stdout.read() == "log of low\n"
        assert follower.wait(timeout=10) == 0


def test_runs_lists_what_is_done(call, finished):
    document = json.loads(call("runs", "--json")[1])
    assert [(run["name"], run["pipeline"], run["done"], run["stages"]) for run in document["runs"]] == [
        ("first", "small", 2, 4)
    ]
    assert "first  small" in call("runs")[1]


def test_an_unknown_run_is_refused_with_a_near_one(call, finished):
    code, _, err = call("status", "frist")
    assert code == 2
    assert "did you mean first?" in err


def test_an_unknown_stage_is_refused_with_its_instances(call, finished):
    code, _, err = call("logs", "max")
    assert code == 2
    assert f"name one: {MAX}" in err


def test_logs_prints_the_last_attempt_or_the_one_asked_for(call, finished):
    assert call("logs", "low")[1] == "low, attempt 2\n"
    assert call("logs", "low", "--attempt", "1")[1] == "low, attempt 1\n"
    assert call("logs", "low", "--attempt", "3")[0] == 2
    assert call("logs", "eval")[0] == 2


def test_an_empty_log_is_said_to_be_empty(call, finished):
    finished.stage("low").attempts()[-1].log.write_text("")
    for follow in ((), ("-f",)):
        code, out, err = call("logs", "low", *follow)
        assert (code, out) == (0, "")
        assert "low printed nothing" in err


def test_an_empty_log_of_a_failed_stage_says_why_it_failed(call, finished):
    attempt = finished.stage("low").attempts()[-1]
    attempt.log.write_text("")
    tell_failure(attempt, "a prompt has 3 tokens", "raise the bound")
    assert "it failed: a prompt has 3 tokens" in call("logs", "low")[2]


def test_following_a_finished_stage_ends_at_once(call, finished):
    assert call("logs", "sft", "-f")[:2] == (0, "log of sft\n")


def test_following_goes_on_over_attempts_until_the_stage_ends(finished, workspace, publish):
    """The second attempt is a living process; a third finishes the stage."""
    low = finished.stage("low")
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    low.attempts()[-1].note_worker(worker.pid)
    command = [sys.executable, "-m", "opdctl", "logs", "low", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=workspace) as follower:
        assert follower.stdout.readline() == "low, attempt 2\n"
        with low.attempts()[-1].log.open("a") as log:
            log.write("more\n")
        assert follower.stdout.readline() == "more\n"
        publish(finished, "low", "rlvr", [], {})
        worker.communicate(b"\n")
        assert follower.stdout.read() == "log of low\n"
        assert follower.wait(timeout=10) == 0


def test_lineage_goes_back_to_the_base_model(call, finished):
    out = call("lineage", MAX)[1]
    assert [part.strip(" └─").split("  ")[0] for part in out.rstrip().split("\n")] == [
        MAX,
        "init: sft",
        "init: new model",
    ]
    assert call("lineage")[1] == out, "by default, of the stages that nothing else reads"
    assert call("lineage", finished.stage(MAX).checkpoint)[1] == out


def test_lineage_as_data_and_as_a_chart(call, finished):
    document = json.loads(call("lineage", MAX, "--json")[1])
    assert {node["title"] for node in document["checkpoints"].values()} == {MAX, "sft", "new model"}
    assert call("lineage", MAX, "--mermaid")[1].count("-->|init|") == 2


def test_lineage_says_where_an_ancestor_is_gone(call, finished):
    (finished.stage("sft").checkpoint / "record.json").unlink()
    assert "is gone or damaged" in call("lineage", MAX)[1].replace("\n", " ")


def test_lineage_says_that_an_ancestor_is_gone_whose_record_has_another_id(call, finished):
    path = finished.stage("sft").checkpoint / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "other"}))
    code, out, err = call("lineage", MAX)
    assert (code, err) == (0, "")
    assert "is gone or damaged" in out.replace("\n", " ")


def test_lineage_of_a_folder_that_is_no_checkpoint_says_what_is_one(call, finished):
    assert call("lineage", finished.stage("sft").checkpoint)[0] == 0
    code, _, err = call("lineage", finished.stage("sft").path)
    assert code == 2
    assert "stages/sft/checkpoint" in err


def test_lineage_of_an_unfinished_stage_is_refused(call, finished):
    code, _, err = call("lineage", "low")
    assert code == 2
    assert "has not finished" in err
