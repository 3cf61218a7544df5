"""Two models that do not speak one language are told apart by their files, each way by its own check."""

import json

import pytest
from gate.models import WORDS, copy, distillation, edit, judged, opd_config, save, stage, verdict
from tokenizers import Tokenizer

from opdctl.engine.tokenizer import load_tokenizer
from opdctl.gate.folders import Files
from opdctl.verdicts import Outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    save(made / "student")
    save(made / "teacher", noise=0.05)
    return made


@pytest.fixture
def teacher(folder, tmp_path):
    """A copy to spoil."""
    made = tmp_path / "other"
    copy(folder / "teacher", "spare").rename(made)
    return made


def against(folder, teacher, check):
    return verdict(distillation(folder, folder / "student", teacher), check, "student -> other")


def test_a_healthy_pair_passes_every_check(folder):
    found = judged(distillation(folder, folder / "student", folder / "teacher"))
    assert {str(one.outcome) for one in found} == {"go"}
    assert {one.check for one in found if one.subject == "student -> teacher"} == {
        *("vocabulary", "width", "special_tokens", "eos", "generation_config", "chat_template"),
        *("same_model", "origin"),
    }


def test_two_ids_swapped_at_equal_size_are_refused_with_both_words(folder, teacher):
    def swap(tokenizer):
        words = tokenizer["model"]["vocab"]
        words["b"], words["c"] = words["c"], words["b"]

    edit(teacher / "tokenizer.json", swap)
    found = against(folder, teacher, "vocabulary")
    assert found.outcome is Outcome.REFUSE
    assert "id 4 is 'b' to student and 'c' to teacher; id 5 is 'c' to student and 'b' to teacher" in found.evidence
    assert found.values["differing"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*WORDS, "f"], "id 8 is no word to student and 'f' to teacher"),
        (WORDS[:7], "id 7 is 'e' to student and no word to teacher"),
    ],
)
def test_a_word_more_or_less_is_refused(folder, tmp_path, words, told):
    found = against(folder, save(tmp_path / "other", words), "vocabulary")
    assert (found.outcome, found.evidence) == (Outcome.REFUSE, told)


def test_a_new_model_is_compared_by_its_words(folder, tmp_path):
    other = save(tmp_path / "other", [*WORDS[:3], "b", "a", *WORDS[5:]])
    found = verdict(distillation(folder, None, other), "vocabulary")
    assert found.evidence.startswith("id 3 is 'a' to student and 'b' to teacher")
    assert verdict(distillation(folder, None, folder / "teacher"), "vocabulary").outcome is Outcome.GO


def test_words_of_other_formats_are_read_too(folder, teacher):
    """Unigram lists its words in the order of their ids; special tokens may be added behind them."""

    def unigram(tokenizer):
        ordered = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])
        tokenizer["model"] = {"type": "Unigram", "vocab": [[word, -1.0] for word, _ in ordered[:-1]]}
        tokenizer["added_tokens"].append({"id": 7, "content": "e", "special": False})

    edit(teacher / "tokenizer.json", unigram)
    found = against(folder, teacher, "vocabulary")
    assert found.outcome is Outcome.WARN  # its scores cut texts otherwise
    assert found.evidence.startswith("the same 8 words, but")


def test_texts_cut_by_other_rules_are_warned_about(folder, teacher):
    edit(teacher / "tokenizer.json", lambda tokenizer: tokenizer.update(normalizer={"type": "Lowercase"}))
    found = against(folder, teacher, "vocabulary")
    assert found.outcome is Outcome.WARN
    assert "cut into them by other rules" in found.evidence


BPE = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3}, "merges": ["a b", "b a"]},
    "added_tokens": [{"id": 4, "content": "<x>", "special": False}],
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}]},
}


def cuts(tmp_path, **changed):
    """What a folder with this BPE tokenizer says of how it cuts texts."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(BPE | changed))
    return Files(tmp_path).vocabulary.cuts


def test_a_tokenizer_that_was_only_saved_again_cuts_as_before(tmp_path):
    """Older files write a merge as one text, and leave out what newer ones spell out."""
    parts = {"trim_offsets": True, "add_prefix_space": False, "type": "ByteLevel"}
    token = BPE["added_tokens"][0] | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    older = cuts(tmp_path, added_tokens=[token], pre_tokenizer=parts)
    Tokenizer.from_file(str(tmp_path / "tokenizer.json")).save(str(tmp_path / "tokenizer.json"))
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["model"]["merges"] == [["a", "b"], ["b", "a"]]
    assert saved["pre_tokenizer"] == parts | {"use_regex": True}
    assert Files(tmp_path).vocabulary.cuts == older


@pytest.mark.parametrize(
    "changed",
    [
        {"model": BPE["model"] | {"merges": ["b a", "a b"]}},
        {"added_tokens": []},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "use_regex": False}]}},
    ],
    ids=["order of merges", "a whole word", "a rule within"],
)
def test_what_changes_the_cut_is_seen(tmp_path, changed):
    assert cuts(tmp_path, **changed) != cuts(tmp_path)


def test_a_tokenizer_of_another_format_is_left_to_its_library(folder, teacher):
    (teacher / "tokenizer.json").rename(teacher / "tokenizer.model")
    found = judged(distillation(folder, folder / "student", teacher))
    assert not [one for one in found if one.check in ("vocabulary", "special_tokens")]


# ----------------------------------------------------------------------------------------------------------- width


def padded(folder, tmp_path):
    made = save(tmp_path / "other", [*WORDS, "x", "y"])
    (made / "tokenizer.json").write_text((folder / "student" / "tokenizer.json").read_text())
    return made


def test_padding_alone_is_refused_where_logits_are_compared_and_said(folder, tmp_path):
    found = against(folder, padded(folder, tmp_path), "width")
    assert found.outcome is Outcome.REFUSE
    assert "student gives 8 logits and teacher 10: both have all of the 8 words, and only the padding" in found.evidence
    assert "resize_token_embeddings" in found.remedy
    assert found.values == {"first": 8, "second": 10, "words": 8}


def test_padding_alone_is_fine_for_a_model_that_only_samples(folder, tmp_path):
    spec = stage(folder, "rlvr", [("init", folder / "student"), ("budget", padded(folder, tmp_path))])
    found = verdict(spec, "width", "student -> other")
    assert found.outcome is Outcome.GO
    assert "it only samples" in found.evidence


def test_equal_padding_is_fine_and_said(folder, tmp_path):
    other = padded(folder, tmp_path)
    found = verdict(distillation(folder, other, copy(other, "twin")), "width", "other -> twin")
    assert (found.outcome, found.evidence) == (Outcome.GO, "10 logits each, 2 of them padding")


def test_a_width_that_only_the_config_has_is_refused(folder, teacher):
    edit(teacher / "config.json", lambda config: config.update(vocab_size=16))
    found = verdict(distillation(folder, folder / "student", teacher), "width", "other")
    assert found.outcome is Outcome.REFUSE
    assert "config.json says vocab_size 16, and the output matrix has 8 rows" in found.evidence


def test_words_without_logits_are_refused(folder, teacher):
    added = {"id": 8, "content": "<think>", "special": True}
    edit(teacher / "tokenizer.json", lambda tokenizer: tokenizer["added_tokens"].append(added))
    found = verdict(distillation(folder, folder / "student", teacher), "width", "other")
    assert (found.outcome, found.evidence) == (Outcome.REFUSE, "9 words, and 8 logits: the last words have none")


# ------------------------------------------------------------------------------------------ special tokens and EOS


def test_a_token_that_is_special_to_one_alone_is_warned_about(folder, teacher):
    def plain(tokenizer):
        tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["content"] != "<bos>"]

    edit(teacher / "tokenizer.json", plain)
    found = against(folder, teacher, "special_tokens")
    assert found.outcome is Outcome.WARN
    assert "'<bos>' is special token 1 to student and no special token to teacher" in found.evidence


def test_another_padding_token_is_warned_about(folder, teacher):
    edit(teacher / "tokenizer_config.json", lambda config: config.update(pad_token="<eos>"))
    assert (
        "pad_token is '<pad>' to student and '<eos>' to teacher" in against(folder, teacher, "special_tokens").evidence
    )


def end_at(model, config, generation, token):
    edit(model / "config.json", lambda content: content.update(eos_token_id=config))
    edit(model / "generation_config.json", lambda content: content.update(eos_token_id=generation))
    edit(model / "tokenizer_config.json", lambda content: content.update(eos_token=token))


def test_models_that_end_at_different_ids_are_refused_with_both(folder, teacher):
    end_at(teacher, 7, [7], "e")
    found = against(folder, teacher, "eos")
    assert found.outcome is Outcome.REFUSE
    assert "student ends at 2 (<eos>), teacher at 7 (e)" in found.evidence


def test_a_teacher_that_ends_at_more_ids_is_fine_and_one_that_ends_at_fewer_is_warned_about(folder, teacher):
    end_at(teacher, 2, [2, 7], "<eos>")
    assert against(folder, teacher, "eos").outcome is Outcome.GO
    found = verdict(distillation(folder, teacher, folder / "student"), "eos")
    assert found.outcome is Outcome.WARN
    assert "an answer that ends at 7 (e) is not over to it" in found.remedy


@pytest.mark.parametrize("decoder", [None, {}])
def test_the_end_of_an_older_folder_is_the_one_that_transformers_reads(teacher, decoder):
    """From special_tokens_map.json, unless tokenizer_config.json has the tokens' table."""

    def older(config):
        config.pop("added_tokens_decoder", None)
        config.update({"eos_token": "e"} if decoder is None else {"eos_token": "e", "added_tokens_decoder": decoder})

    edit(teacher / "tokenizer_config.json", older)
    edit(teacher / "special_tokens_map.json", lambda config: config.update(eos_token={"content": "d"}))
    assert Files(teacher).named["eos_token"] == load_tokenizer(teacher).eos_token == ("d" if decoder is None else "e")


def test_rollouts_of_verl_must_stop_at_every_end_of_the_student(folder, teacher):
    end_at(teacher, 2, 7, "<eos>")
    found = verdict(distillation(folder, teacher, folder / "teacher", backend="verl"), "eos", "other")
    assert found.outcome is Outcome.REFUSE
    assert "rollouts by vLLM would not stop at 2 (<eos>): the files that it reads name [7]" in found.evidence
    healthy = judged(distillation(folder, folder / "student", folder / "teacher", backend="verl"))
    assert not [one for one in healthy if one.check == "eos" and one.outcome is not Outcome.GO]


# ------------------------------------------------------------------------------------------------ settings of both


def test_a_penalty_that_one_model_has_is_warned_about_and_its_temperature_is_not(folder, teacher):
    edit(teacher / "generation_config.json", lambda config: config.update(temperature=0.6, top_p=0.95))
    found = against(folder, teacher, "generation_config")
    assert (found.outcome, found.evidence) == (
        Outcome.GO,
        "the same but for temperature, top_p, which the pipeline sets",
    )
    edit(teacher / "generation_config.json", lambda config: config.update(repetition_penalty=1.3))
    found = against(folder, teacher, "generation_config")
    assert (found.outcome, found.evidence) == (Outcome.WARN, "repetition_penalty is None and 1.3")


def test_chat_templates_that_differ_by_one_newline_are_warned_about_with_it(folder, teacher, tmp_path):
    student = tmp_path / "student"
    copy(folder / "student", "apart").rename(student)
    template = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{% endfor %}\n"
    (student / "chat_template.jinja").write_text(template)
    edit(
        teacher / "tokenizer_config.json",
        lambda config: config.update(chat_template=template.replace(">\n{{", ">\n\n{{")),
    )
    found = verdict(distillation(folder, student, teacher), "chat_template")
    assert found.outcome is Outcome.WARN
    assert found.evidence == "- and + differ:\n+\\n"


def test_equal_chat_templates_pass_wherever_they_are_written(folder, teacher, tmp_path):
    template = "{{ messages }}"
    student = tmp_path / "student"
    copy(folder / "student", "there").rename(student)
    (student / "chat_template.jinja").write_text(template)
    listed = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    edit(teacher / "tokenizer_config.json", lambda config: config.update(chat_template=listed))
    assert verdict(distillation(folder, student, teacher), "chat_template").outcome is Outcome.GO


def test_a_template_that_only_one_has_is_warned_about(folder, teacher):
    (teacher / "chat_template.jinja").write_text("{{ messages }}")
    assert against(folder, teacher, "chat_template").evidence == "student has none and teacher has one"


# -------------------------------------------------------------------------------------------------- who with whom


@pytest.mark.parametrize(
    ("kind", "inputs", "config", "subjects"),
    [
        ("rlvr", {"init": "a", "reference": "b", "budget": "c"}, {}, {"a -> b", "a -> c"}),
        ("opd", {"student": "a", "teachers": "b", "reference": "c"}, opd_config(["t"]), {"a -> b", "a -> c"}),
        ("eval", {"before": "a", "teachers": "b", "after": "c"}, {"divergence": True}, {"a -> b", "a -> c"}),
        ("eval", {"before": "a", "teachers": "b", "after": "c"}, {}, set()),
        ("merge", {"base": "a", "models": "b"}, {}, {"a -> b"}),
        ("sft", {"init": "a"}, {}, set()),
        ("rlvr", {"init": "a", "grader": "b"}, {}, set()),
    ],
)
def test_models_that_meet_are_compared_and_no_others(folder, tmp_path, kind, inputs, config, subjects):
    given = []
    for role, name in inputs.items():
        copy(folder / "student", f"{kind}-{name}").rename(tmp_path / name)
        given.append((role, tmp_path / name))
    found = judged(stage(tmp_path, kind, given, config=config))
    assert {one.subject for one in found if one.check == "vocabulary"} == subjects


def test_inputs_that_are_not_there_yet_are_left_for_later(folder, tmp_path):
    found = judged(distillation(folder, folder / "student", tmp_path / "later"))
    assert [one for one in found if "later" in one.subject] == []


def test_a_folder_stands_for_the_model_that_begins_with_it(folder, tmp_path):
    other = save(tmp_path / "other", WORDS[:7])
    gate = {"stand_ins": {"0": str(folder / "student")}}
    spec = distillation(folder, tmp_path / "sft", other, gate=gate)
    assert verdict(spec, "vocabulary", "sft -> other").outcome is Outcome.REFUSE
    assert not [one for one in judged(spec) if one.check == "origin"]  # its weights are still to be made


def test_a_broken_json_file_counts_as_absent(folder, teacher):
    (teacher / "generation_config.json").write_text("{")
    found = judged(distillation(folder, folder / "student", teacher))
    assert not [one for one in found if one.check == "generation_config"]
    assert json.loads((teacher / "config.json").read_text())["eos_token_id"] == 2
