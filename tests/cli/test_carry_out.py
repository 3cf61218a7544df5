"""`plan`, `validate` and `run --dry-run`."""

import json

import toy

from opdctl.cli.carry_out import _show_outcome
from opdctl.plan import make_plan
from opdctl.runner import Outcome
from opdctl.store import Workspace


def test_plan_shows_decision_reason_and_losses_and_writes_nothing(call, workspace):
    code, out, _ = call("plan", "kimi_k3", "scale=smoke")
    assert code == 0
    assert "kimi_k3, run kimi_k3: 14 stages: 14 run" in out
    assert "├ domain=general_agents  run" in out
    assert out.count("loss: ") == 4
    assert max(map(len, out.split("\n"))) <= 80
    assert list(workspace.iterdir()) == []


def test_plan_as_json_holds_every_stage(call):
    code, out, err = call("plan", "kimi_k3", "--json", "--run", "other")
    document = json.loads(out)
    assert (code, err, document["run"]) == (0, "", "other")
    assert [stage["name"] for stage in document["stages"]][:2] == ["sft", "max[domain=general]"]
    assert {stage["decision"] for stage in document["stages"]} == {"run"}
    assert document["stages"][1]["formula"]


def test_run_dry_run_is_plan(call, workspace):
    assert call("run", "kimi_k3", "--dry-run") == call("plan", "kimi_k3")
    assert list(workspace.iterdir()) == []


def test_validate_says_what_is_valid(call):
    assert call("validate", "kimi_k3")[:2] == (0, "packaged kimi_k3: valid, 14 stages\n")
    assert json.loads(call("validate", "kimi_k3", "--json")[1])["valid"] is True


def test_an_evaluation_that_this_run_did_not_make_is_not_shown(workspace, capfd):
    """What stands on disk judges the models of before."""
    wanted = toy.pipeline({"a": toy.sft(), "eval": toy.evaluation("stage:a")})
    toy.run(wanted)
    plan = make_plan(wanted, Workspace(workspace).run("r"))
    capfd.readouterr()
    _show_outcome(plan, Outcome(done=["a", "eval"]), json=True)
    assert [*json.loads(capfd.readouterr().out)["evaluations"]] == ["eval"]
    _show_outcome(plan, Outcome(done=["a"], failed={"eval": "out of memory"}), json=True)
    assert json.loads(capfd.readouterr().out)["evaluations"] == {}
