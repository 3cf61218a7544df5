"""What an evaluation publishes beside its report: each completion's outcome, and the distance to the teachers."""

import json
from pathlib import Path

import pytest
import torch
from engine.models import tiny_policy
from engine.stages import MODEL, ROLLOUT, Recorder, run, spec_of

from opdctl.backends.contract import InputSpec, Stopped
from opdctl.engine.batch import Sequence
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.distance import mean_divergence
from opdctl.errors import StageRefused
from opdctl.settings import NewModel


@pytest.fixture
def models(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        save_policy(*new_policy(NewModel.model_validate(MODEL), seed), folder, dtype=torch.float32)
    return folders


def exam(folder, inputs, **more):
    config = {"data": {"tasks": ["math", "code"]}, "rollout": ROLLOUT | {"prompts": 6, "group_size": 2}, **more}
    return spec_of(folder, "eval", config, inputs)


def test_outcomes_add_up_to_the_report(tmp_path, models):
    spec = exam(
        tmp_path / "eval", [InputSpec("models", name, str(folder)) for name, folder in zip("ab", models, strict=True)]
    )
    run(spec)
    report = json.loads(Path(spec.output, "report.json").read_text())
    lines = [json.loads(line) for line in Path(spec.output, "outcomes.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 6 * 2
    for model in "ab":
        for cell, counts in report["models"][model].items():
            own = [line for line in lines if (line["model"], line["cell"]) == (model, cell)]
            assert [(line["problem"], line["sample"]) for line in own] == [(i, g) for i in range(6) for g in range(2)]
            assert sum(line["correct"] for line in own) == counts["correct"]
            assert sum(line["tokens"] for line in own) == counts["length_sum"]


def test_the_divergence_is_zero_to_oneself_and_positive_to_another(tmp_path, models):
    one, two = map(str, models)
    teachers = [InputSpec("teachers", f"t-{domain}", two, {"domain": domain}) for domain in ("math", "code")]
    inputs = [InputSpec("before", "sft", one), *teachers, InputSpec("after", "mopd", two)]
    spec = exam(tmp_path / "eval", inputs, divergence=True)
    metrics = run(spec).metrics
    found = json.loads(Path(spec.output, "report.json").read_text())["divergence"]
    for cell in ("math", "code"):
        assert found["mopd"][cell] == pytest.approx(0, abs=1e-9)
        assert found["sft"][cell] > 0.01
        assert metrics[f"sft/{cell}/divergence"] == found["sft"][cell]


@torch.no_grad()
def test_the_mean_divergence_is_the_sum_over_the_vocabulary():
    policy, teacher = tiny_policy(0)[0], tiny_policy(1)[0]
    sequences = [Sequence((1, 5), (7, 9, 2)), Sequence((1, 4, 6), (8, 2))]
    expected, tokens = 0.0, 0
    for sequence in sequences:
        for at in range(len(sequence.completion)):
            seen = Sequence((*sequence.prompt, *sequence.completion[:at]), (0,))
            p, q = (
                (model.hidden(model.batch([seen])) @ model.head().T).log_softmax(-1)[0] for model in (policy, teacher)
            )
            expected += sum(float(p[v].exp() * (p[v] - q[v])) for v in range(len(p)))
            tokens += 1
    for budget in (4, 1000):
        assert mean_divergence(policy, teacher, sequences, budget) == pytest.approx(expected / tokens, rel=1e-5)


def test_scores_stay_with_their_model_when_labels_are_exchanged_between_attempts(tmp_path, models):
    def labelled(where, first, second):
        given = zip((first, second), models, strict=True)
        return exam(where, [InputSpec("models", label, str(folder), source=folder.name) for label, folder in given])

    def outcomes(spec):
        return Path(spec.output, "outcomes.jsonl").read_text()

    whole = labelled(tmp_path / "whole", "b", "a")
    run(whole)
    with pytest.raises(Stopped):
        run(labelled(tmp_path / "eval", "a", "b"), Recorder(stop_at=1))
    resumed = labelled(tmp_path / "eval", "b", "a")
    run(resumed)
    assert outcomes(resumed) == outcomes(whole)


def test_a_divergence_between_vocabularies_is_refused_before_anything_is_asked(tmp_path, models):
    words = MODEL["tokenizer"]["words"]
    other = {**MODEL, "tokenizer": {"words": [*words[:-2], words[-1], words[-2]]}}
    save_policy(*new_policy(NewModel.model_validate(other), 2), tmp_path / "other", dtype=torch.float32)
    one, two = map(str, models)
    teachers = [
        InputSpec("teachers", domain, path, {"domain": domain})
        for domain, path in {"math": two, "code": str(tmp_path / "other")}.items()
    ]
    spec = exam(
        tmp_path / "eval",
        [InputSpec("before", "sft", one), *teachers, InputSpec("after", "mopd", two)],
        divergence=True,
    )
    recorder = Recorder()
    with pytest.raises(StageRefused, match="teacher code has another vocabulary"):
        run(spec, recorder)
    assert not recorder.events
