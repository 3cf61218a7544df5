"""Teachers share the student's words; every row finds its teacher; no more are in memory than allowed."""

import gc
import re
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from opdctl.backends.contract import InputSpec
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.teachers import Router, TeacherPool, check_vocabularies
from opdctl.errors import StageRefused
from opdctl.settings import NewModel


def teacher(domain: str, effort: str) -> InputSpec:
    return InputSpec("teachers", f"{effort}[domain={domain}]", "folder", {"domain": domain, "effort": effort})


TEACHERS = [teacher("math", "low"), teacher("math", "max"), teacher("code", "low")]


def test_a_row_goes_to_the_teacher_of_its_columns():
    router = Router(TEACHERS, ["domain", "effort"], None)
    assert router.teacher({"domain": "code", "effort": "low", "source": "x"}) == 2
    assert router.teacher({"domain": "math", "effort": "max"}) == 1


def test_a_row_without_a_route_is_refused_by_its_columns():
    router = Router(TEACHERS, ["domain", "effort"], None)
    with pytest.raises(StageRefused, match="domain=code, effort=max"):
        router.teacher({"domain": "code", "effort": "max"})


def test_a_default_teacher_takes_what_has_no_route():
    router = Router(TEACHERS, ["domain", "effort"], "max[domain=math]")
    assert router.teacher({"domain": "code", "effort": "max"}) == 1


class Model:
    """Stands where a policy would: the pool never looks inside."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_no_more_models_live_than_are_resident(resident):
    alive: weakref.WeakSet[Model] = weakref.WeakSet()
    most = 0
    lock = threading.Lock()

    def load(number: int) -> Model:
        nonlocal most
        model = Model(number)
        with lock:
            alive.add(model)
            gc.collect()
            most = max(most, len(alive))
        return model

    pool = TeacherPool(load, resident=resident)
    order = [0, 1, 2, 3] * 3
    for number, then in zip(order, [*order[1:], None], strict=True):
        assert pool.get(number, then=then).number == number
    pool.close()
    assert most <= resident


def test_the_next_teacher_is_loaded_while_this_one_works():
    loaded: list[int] = []
    second = threading.Event()

    def load(number: int) -> Model:
        loaded.append(number)
        if number == 1:
            second.set()
        return Model(number)

    pool = TeacherPool(load, resident=2)
    pool.get(0, then=1)
    assert second.wait(5)
    pool.get(1)
    assert loaded == [0, 1]
    pool.close()


def test_resident_teachers_are_not_loaded_again():
    pool = TeacherPool(Model, resident=3)
    for number in [0, 1, 2] * 5:
        pool.get(number)
    assert pool.loads == 3


WORDS = ["<pad>", "<bos>", "<eos>", "a", "b", "c"]
SHAPE = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 8}


def model(words):
    return new_policy(NewModel.model_validate({"source": "new", "shape": SHAPE, "tokenizer": {"words": words}}), seed=0)


def saved(folder, words):
    save_policy(*model(words), folder, dtype=torch.float32)
    return InputSpec("teachers", folder.name, str(folder))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*WORDS[:3], "b", "a", "c"], "id 3 is 'a' to the policy and 'b' to it"),
        ([*WORDS, "d"], "id 6 is no word to the policy and 'd' to it"),
        (WORDS[:5], "id 5 is 'c' to the policy and no word to it"),
    ],
)
def test_a_teacher_with_another_vocabulary_is_refused_with_the_first_id_that_differs(tmp_path, words, told):
    policy, tokenizer = model(WORDS)
    teachers = [saved(tmp_path / "same", WORDS), saved(tmp_path / "other", words), InputSpec("teachers", "new", "")]
    with pytest.raises(StageRefused, match=re.escape(told)) as refused:
        check_vocabularies(tokenizer, policy.vocab_size, teachers)
    assert "teacher other has" in str(refused.value)
    assert "teacher same" not in str(refused.value)


def test_a_teacher_with_more_logits_than_the_student_is_refused_with_both_numbers(tmp_path):
    policy, tokenizer = model(WORDS)
    teacher = saved(tmp_path / "padded", [*WORDS, "x", "y"])
    tokenizer.save_pretrained(teacher.path)
    with pytest.raises(StageRefused, match="of 6 words, padded to another width: it gives 8 logits and the policy 6"):
        check_vocabularies(tokenizer, policy.vocab_size, [teacher])


def test_a_reference_with_another_vocabulary_is_refused_by_its_role(tmp_path):
    policy, tokenizer = model(WORDS)
    reference = replace(saved(tmp_path / "other", [*WORDS[:3], "b", "a", "c"]), role="reference")
    with pytest.raises(StageRefused, match="reference other has another vocabulary than the policy"):
        check_vocabularies(tokenizer, policy.vocab_size, [reference])


def test_a_model_that_only_samples_may_be_padded_otherwise(tmp_path):
    policy, tokenizer = model(WORDS)
    budget = replace(saved(tmp_path / "padded", [*WORDS, "x", "y"]), role="budget")
    tokenizer.save_pretrained(budget.path)
    check_vocabularies(tokenizer, policy.vocab_size, [budget])


def test_another_vocabulary_that_was_accepted_is_compared_by_its_numbers(tmp_path):
    policy, tokenizer = model(WORDS)
    other = saved(tmp_path / "other", [*WORDS[:3], "b", "a", "c"])
    check_vocabularies(tokenizer, policy.vocab_size, [other], accepted=["vocabulary"])
    wide = saved(tmp_path / "wide", [*WORDS, "d"])
    with pytest.raises(StageRefused, match="gives 7 logits and the policy 6"):
        check_vocabularies(tokenizer, policy.vocab_size, [wide], accepted=["vocabulary"])
