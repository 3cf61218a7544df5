"""Gates: what is outside of its bounds, and what a run and its plan do about it (toy backend)."""

import io
import math

import pytest
import toy
from rich.console import Console

from opdctl.cli.inspect import stage_lines
from opdctl.console.plan import plan_data, plan_view
from opdctl.errors import ConfigError
from opdctl.gates import broken, describe
from opdctl.plan import Decision, make_plan
from opdctl.settings import Gate
from opdctl.store import Workspace


def gate(action="stop", metric="loss", **bounds):
    return {"metric": metric, "action": action, **(bounds or {"max": -1.0})}  # a toy's loss is never below zero


def chain(*gates, **more):
    """a reads sft, b reads a; `apart` reads nothing."""
    stages = {
        "sft": toy.sft(gates=list(gates)),
        "a": toy.sft("stage:sft"),
        "b": toy.sft("stage:a"),
        "apart": toy.sft(lr=0.3),
    }
    return toy.pipeline(stages, machine={"slots": 1, "cpus": 2}, **more)


def planned(wanted, **options):
    """With the toy's revision, as `toy.run` plans."""
    import toy_backend

    from opdctl.backends import BACKENDS

    real, BACKENDS["embedded"] = BACKENDS["embedded"], toy_backend
    try:
        return make_plan(wanted, Workspace(wanted.folder).run("r"), **options)
    finally:
        BACKENDS["embedded"] = real


def decisions(wanted, **options):
    return {item.stage.name: str(item.decision) for item in planned(wanted, **options).stages}


def shown(plan):
    console = Console(width=200, file=io.StringIO())
    console.print(plan_view(plan))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("bounds", "value", "told"),
    [
        ({"min": 0.5}, 0.31, "acc 0.31 < min 0.5"),
        ({"min": 0.5}, 0.5, ""),
        ({"max": 0.5}, 0.6, "acc 0.6 > max 0.5"),
        ({"max": 0.5}, 0.5, ""),
        ({"min": 0.2, "max": 0.5}, 0.3, ""),
        ({"max": 0.5}, math.nan, "acc nan > max 0.5"),
        ({"min": 0.5}, math.nan, "acc nan < min 0.5"),
    ],
)
def test_a_value_outside_of_its_bounds_breaks_the_gate(bounds, value, told):
    found = list(broken([Gate(metric="acc", action="warn", **bounds)], {"acc": value}))
    assert [item.text for item in found] == [told] * bool(told)


def test_an_unknown_metric_stops_whatever_the_gate_says_and_names_those_there_are():
    (found,) = broken([Gate(metric="los", action="warn", max=1.0)], {"loss": 0.0, "reward": 1.0})
    assert (found.unknown, found.action) == (True, "stop")
    assert found.text == "the stage has no metric 'los'"
    assert found.known == " (did you mean 'loss'? metrics: loss, reward)"


def test_a_metric_of_one_model_is_asked_for_by_its_name():
    metrics = {"loss": 0.0, "a/math/accuracy": 0.5, "a/accuracy": 0.5, "b/accuracy": 0.5}
    (found,) = broken([Gate(metric="accuracy", action="warn", max=1.0)], metrics)
    assert "metrics: a/accuracy, b/accuracy, a/math/accuracy)" in found.known


def test_a_gate_needs_a_bound():
    with pytest.raises(ValueError, match="needs min, max or both"):
        Gate(metric="loss", action="warn")
    with pytest.raises(ValueError, match="min 2 is above max 1: nothing passes"):
        Gate(metric="loss", action="warn", min=2.0, max=1.0)
    with pytest.raises(ValueError, match="at least 1 character"):
        Gate(metric="", action="warn", max=1.0)
    assert describe(Gate(metric="loss", action="skip", min=0.0, max=2.5)) == "0 <= loss <= 2.5, else skip"


def test_a_gate_that_stops_lets_running_stages_finish_and_starts_nothing_more(workspace):
    stages = {
        "sft": toy.sft(gates=[gate()]),
        "slow": toy.sft(task="slow"),
        "a": toy.sft("stage:sft"),
        "later": toy.sft("stage:slow"),
    }
    notes = toy.Notes()
    outcome = toy.run(toy.pipeline(stages, knobs={"slow": {"sleep_ms": 150}}), reporter=notes)
    assert sorted(outcome.done) == ["sft", "slow"]
    assert list(outcome.failed) == ["sft"]
    assert outcome.failed["sft"].startswith("gate of sft: loss 0.")
    assert outcome.not_run == dict.fromkeys(("a", "later"), outcome.failed["sft"])
    [(stage, message, _)] = notes.of("failed")
    assert (stage, message.endswith("> max -1; nothing more is started")) == ("sft", True)


def test_a_gate_that_skips_leaves_out_all_that_depends_on_the_stage_and_nothing_else(workspace):
    wanted = chain(gate("skip"))
    outcome = toy.run(wanted)
    assert sorted(outcome.done) == ["apart", "sft"]
    assert not outcome.failed
    assert set(outcome.not_run) == {"a", "b"}
    assert outcome.not_run["b"].startswith("gate of sft: loss 0.")


def test_a_gate_that_warns_is_told_and_changes_nothing(workspace):
    notes = toy.Notes()
    outcome = toy.run(chain(gate("warn")), reporter=notes)
    assert (len(outcome.done), outcome.failed, outcome.not_run) == (4, {}, {})
    assert [text.startswith("gate of sft: loss 0.") for (text,) in notes.of("message")] == [True]


def test_a_gate_that_is_passed_says_nothing(workspace):
    notes = toy.Notes()
    assert len(toy.run(chain(gate(min=0.0, max=1.0)), reporter=notes).done) == 4
    assert notes.of("message") == []


def test_an_unknown_metric_stops_the_run_once_it_is_known_and_the_stage_is_kept(workspace):
    outcome = toy.run(chain(gate("warn", "los")))
    assert outcome.done == ["sft"]
    assert "did you mean 'loss'" in outcome.failed["sft"]
    assert set(outcome.not_run.values()) == {"gate of sft: the stage has no metric 'los'"}
    mended = chain(gate("warn"))
    assert decisions(mended) == {"sft": "reuse", "a": "run", "b": "run", "apart": "run"}


@pytest.mark.parametrize("options", [{}, {"rerun": ["sft"]}, {"only": ["b"]}])
def test_an_unknown_metric_of_a_finished_stage_is_refused_before_anything_starts(workspace, options):
    toy.run(chain())
    with pytest.raises(ConfigError) as caught:
        planned(chain(gate("warn", "los")), **options)
    assert caught.value.problems[0].startswith("stages.sft.gates: the stage has no metric 'los' (did you mean 'loss'")


def test_a_reused_stage_is_looked_at_again(workspace):
    toy.run(chain(), only=["sft"])
    assert decisions(chain(gate("skip"))) == {"sft": "reuse", "a": "skipped", "b": "skipped", "apart": "run"}
    assert decisions(chain(gate())) == {"sft": "reuse", "a": "skipped", "b": "skipped", "apart": "skipped"}
    outcome = toy.run(chain(gate()))
    assert (outcome.done, list(outcome.failed)) == (["sft"], ["sft"])
    outcome = toy.run(chain(gate("skip")))
    assert (sorted(outcome.done), outcome.failed) == (["apart", "sft"], {})
    assert not toy.stage(chain(), "a").attempts()


def test_finished_dependants_are_skipped_like_others(workspace):
    toy.run(chain(), only=["sft", "a"])
    assert decisions(chain(gate("skip"))) == {"sft": "reuse", "a": "skipped", "b": "skipped", "apart": "run"}


def test_a_stage_that_is_trained_again_has_not_broken_its_gate_yet(workspace):
    toy.run(chain())
    assert decisions(chain(gate()), rerun=["sft"])["a"] == "run"


def test_gates_of_stages_that_nobody_asks_for_do_not_count(workspace):
    toy.run(chain(), only=["sft"])
    assert decisions(chain(gate()), only=["apart"])["apart"] == "run"
    assert decisions(chain(gate()), only=["a"])["a"] == "skipped"


def test_gates_stay_out_of_the_identity(workspace):
    toy.run(chain())
    assert set(decisions(chain(gate(min=0.0))).values()) == {"reuse"}


def test_the_plan_and_the_status_show_gates(workspace):
    wanted = chain(gate("warn"))
    (before, *_) = planned(wanted).stages
    assert (before.decision, before.broken) == (Decision.RUN, ())
    assert shown(planned(wanted)).count("not run yet; gate: loss <= -1, else warn") == 1
    toy.run(wanted)
    assert "> max -1 (warn)" in shown(planned(wanted))
    data = plan_data(planned(wanted))["stages"][0]
    assert data["gates"][0]["broken"].startswith("loss 0.")
    notes = {line.stage: line.note for line in stage_lines(Workspace(wanted.folder).run("r"))}
    assert notes["sft"].startswith("gate: loss 0.")
    assert notes["sft"].endswith("> max -1 (warn)")
    assert notes["a"] == ""


@pytest.mark.parametrize("metric", ["text", "none", "nested", "huge"])
def test_a_final_metric_that_is_no_number_breaks_its_gate_and_nothing_else(workspace, metric):
    wanted = toy.pipeline(
        {"sft": toy.sft(task="odd", gates=[gate(metric=metric)]), "apart": toy.sft(lr=0.3)},
        knobs={"odd": {"odd_values": 1}, "plain": {"sleep_ms": 100}},
    )
    outcome = toy.run(wanted)
    assert f"the stage has no metric '{metric}'" in outcome.failed["sft"]
    assert {"sft", "apart"} <= {*outcome.done}
    metrics = toy.stage(wanted, "sft").record().metrics
    assert math.isnan(metrics["nan"])
    assert metrics["loss"] > 0
