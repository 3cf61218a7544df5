"""Every model must hold prompt and response; limits that no prompt reaches are no fault."""

import json

import pytest
from gate.models import CHAIN, copy, distillation, edit, judged, opd_config, save, stage, verdict
from tokenizers import Tokenizer
from tokenizers.models import BPE

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
    config = {"data": {"tasks": ["t"]}, "rollout": {"prompts": 4, "max_prompt_tokens": 8, "max_completion_tokens": 20}}
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


# ------------------------------------------------------------------------------------- prompts and max_prompt_tokens


def rewarded(folder, rows, model=None, limit=4, steps=4, **task):
    """RL on the rows of a file; without a model on a new one, whose words are separated by blanks."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": text, "a": "a"}) + "\n" for text in rows))
    mine = {"task": "file", "path": str(file), "prompt": "q", "answer": "a", "verifier": "exact", "held_out": 0.0}
    config = {
        "data": {"tasks": ["mine"]},
        "rollout": {"prompts": 4, "group_size": 2, "max_prompt_tokens": limit, "max_completion_tokens": 4},
        "train": {"max_steps": steps, "global_batch_size": 8, "optimizer": {"lr": 1e-3}},
    }
    return stage(folder, "rlvr", [("init", model)], config=config, tasks={"mine": mine | task})


def test_a_prompt_above_the_stages_bound_is_refused_with_key_numbers_and_the_prompt(tmp_path):
    found = context(rewarded(tmp_path, [*["a b"] * 6, "a b c d e"]))["task mine"]
    assert found.outcome is Outcome.REFUSE
    assert found.evidence == (
        "the longest of 16 prompts looked at has 5 tokens, and config.rollout.max_prompt_tokens is 4: 'a b c d e'"
    )
    assert found.remedy.startswith("raise config.rollout.max_prompt_tokens to 5, ")
    assert list(context(rewarded(tmp_path, ["a b c d"] * 6))) == ["new"]


def test_rows_that_the_stage_does_not_come_to_are_not_judged(tmp_path):
    spec = rewarded(tmp_path, [*["a"] * 63, "a b c d e"], steps=1)
    assert list(context(spec)) == ["new"]


def test_tokens_are_counted_by_the_tokenizer_of_the_model_that_is_asked(tmp_path):
    """Byte by byte: `word` is four tokens, though it is one word."""
    model = save(tmp_path / "model")
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate("dorw")}, []))
    tokenizer.save(str(model / "tokenizer.json"))
    assert context(rewarded(tmp_path, ["word"] * 4, model))["model"].outcome is Outcome.GO
    found = context(rewarded(tmp_path, ["word"] * 4, model, limit=3))["task mine"]
    assert found.evidence.startswith("the longest of 16 prompts looked at has 4 tokens")


def test_a_conversation_has_at_least_the_tokens_of_its_messages(tmp_path):
    found = context(rewarded(tmp_path, ["a b c"] * 4, template="chat", system="d e"))["task mine"]
    assert "has at least 5 tokens" in found.evidence


def test_the_prompts_of_an_evaluation_are_the_held_out_ones(tmp_path):
    spec = rewarded(tmp_path, ["a b c d e"] * 4)
    config = {
        "data": {"tasks": ["mine"]},
        "rollout": {"prompts": 2, "max_prompt_tokens": 4, "max_completion_tokens": 4},
    }
    held = tmp_path / "held.jsonl"
    tasks = {"mine": spec.tasks["mine"] | {"eval_path": str(held)}}
    for text, outcome in (("a b", []), ("a b c d c", [Outcome.REFUSE])):
        held.write_text("".join(json.dumps({"q": f"{text} {word}".strip(), "a": "a"}) + "\n" for word in ("", "e")))
        found = context(stage(tmp_path, "eval", [("models", None)], config=config, tasks=tasks))
        assert [one.outcome for subject, one in found.items() if subject == "task mine"] == outcome


def test_a_tokenizer_that_cannot_be_read_is_left_to_those_who_load_it(tmp_path):
    model = save(tmp_path / "model")
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}')
    assert list(context(rewarded(tmp_path, ["a b c d e"] * 4, model))) == ["model"]
