"""Every model must hold prompt and response; limits that no prompt reaches are no fault."""

import pytest
from gate.models import CHAIN, copy, distillation, edit, judged, opd_config, save, stage, verdict

from opdctl.gate.folders import Files
from opdctl.verdicts import Outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    save(made / "student", max_position_embeddings=32)
    save(made / "teacher", max_position_embeddings=24, noise=0.1)
    return made


def rolled_out(folder, backend="embedded", prompt=8, **more):
    config = opd_config(["t0"], **more)
    config["rollout"]["max_prompt_tokens"] = prompt
    return distillation(folder, folder / "student", folder / "teacher", config=config, backend=backend)


def context(spec):
    return {one.subject: one for one in judged(spec) if one.check == "context"}


def test_a_teacher_with_less_room_than_the_student_is_refused_with_both_numbers(folder):
    found = context(rolled_out(folder, completion=25))
    assert found["student"].outcome is Outcome.GO
    assert found["teacher"].outcome is Outcome.REFUSE
    assert found["teacher"].evidence == (
        "the longest prompt looked at, 6 words, + completion 25 = 31 tokens, and teacher has max_position_embeddings 24"
    )
    found = context(rolled_out(folder, completion=16))
    assert [one.outcome for one in found.values()] == [Outcome.GO, Outcome.GO]
    assert found["teacher"].evidence == "prompt 8 + completion 16 = 24 of 24 tokens"


def test_servers_of_verl_need_one_token_more(folder):
    found = context(rolled_out(folder, "verl", completion=16))
    assert found["student"].outcome is Outcome.GO
    assert found["teacher"].outcome is Outcome.REFUSE
    assert found["teacher"].evidence == (
        "prompt 8 + completion 16 + 1 = 25 tokens, and teacher has max_position_embeddings 24"
    )
    assert found["teacher"].remedy.startswith("lower the limits of the rollout by 1 ")


def test_a_limit_that_no_prompt_reaches_is_no_fault(folder):
    """Chains of four links have 6 words; verl starts its servers for the limit itself."""
    found = context(rolled_out(folder, prompt=100, completion=4))
    assert [one.outcome for one in found.values()] == [Outcome.GO, Outcome.GO]
    assert "the longest prompt looked at" in found["teacher"].evidence
    assert context(rolled_out(folder, "verl", prompt=100, completion=4))["teacher"].outcome is Outcome.REFUSE


def test_prompts_that_are_too_long_for_the_model_are_found_in_the_rows(folder):
    spec = rolled_out(folder, prompt=100, completion=4)
    long = distillation(
        folder,
        folder / "student",
        folder / "teacher",
        config=spec.config,
        tasks={"t0": CHAIN | {"links": 24, "strides": {"max": 1}}},
    )
    assert context(long)["teacher"].outcome is Outcome.REFUSE


def test_a_stretched_model_has_its_full_length_on_verls_servers_alone(folder, tmp_path):
    stretched = copy(folder / "teacher", "spare").rename(tmp_path / "stretched")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    edit(stretched / "config.json", lambda config: config.update(rope_parameters=None, rope_scaling=scaling))
    config = opd_config(["t0"], completion=60)
    for backend, wanted in (("verl", Outcome.GO), ("embedded", Outcome.REFUSE)):
        spec = distillation(folder, stretched, stretched, config=config, backend=backend)
        assert context(spec)["stretched"].outcome is wanted


def test_stages_without_rollouts_have_no_such_limit(folder):
    spec = stage(folder, "sft", [("init", folder / "student")], config={"max_tokens": 4096})
    assert context(spec) == {}


def test_a_model_that_states_no_limit_is_left_alone(folder, tmp_path):
    other = copy(folder / "teacher", "other").rename(tmp_path / "other")
    edit(other / "config.json", lambda config: config.pop("max_position_embeddings"))
    assert "other" not in context(distillation(folder, folder / "student", other))


def test_every_model_of_an_evaluation_is_looked_at(folder):
    config = {"data": {"tasks": ["t"]}, "rollout": {"max_prompt_tokens": 8, "max_completion_tokens": 20}}
    inputs = [("models", folder / "student"), ("models", folder / "teacher")]
    found = context(stage(folder, "eval", inputs, config=config, tasks={"t": CHAIN}))
    assert [one.outcome for one in found.values()] == [Outcome.GO, Outcome.REFUSE]
    assert verdict(stage(folder, "eval", inputs[:1], config=config, tasks={"t": CHAIN}), "context").values == {
        "needed": 28,
        "positions": 32,
    }


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}, 24),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5}, 20),
        ({"type": "linear", "factor": 2.0}, 48),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 24),
        ({"type": "su", "factor": 8.0}, 24),
        ({"rope_type": "default"}, 24),
    ],
)
def test_lengths_are_stretched_as_vllm_does_it(folder, tmp_path, rope, positions):
    """By hand from its `_get_and_verify_max_len`, in which Gemma 3 says its whole length in the configuration."""
    model = copy(folder / "teacher", "spare").rename(tmp_path / "model")
    edit(model / "config.json", lambda config: config.pop("rope_parameters", None))
    edit(model / "config.json", lambda config: config.update(rope_scaling=rope))
    assert Files(model).positions(scaled=True) == positions
    assert Files(model).positions(scaled=False) == 24
    edit(model / "config.json", lambda config: config.update(model_type="gemma3_text"))
    assert Files(model).positions(scaled=True) == 24
