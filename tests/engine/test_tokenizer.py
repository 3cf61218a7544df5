import re

import pytest
from engine.models import WORDS
from transformers import AutoTokenizer, BertTokenizer

from opdctl.engine.tokenizer import encode, encode_batch, load_tokenizer, word_tokenizer
from opdctl.errors import OpdctlError


@pytest.fixture(params=["made", "loaded"])
def tokenizer(request, tmp_path):
    made = word_tokenizer(WORDS)
    if request.param == "made":
        return made
    made.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_a_word_is_its_place_in_the_list(tokenizer):
    assert encode(tokenizer, " w3  w28 <eos>\nw5") == [3, 28, 2, 5]
    assert encode_batch(tokenizer, ["w3", "", "w4 w5"]) == [[3], [], [4, 5]]
    assert encode_batch(tokenizer, []) == []
    assert len(tokenizer) == len(WORDS)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_decoding_joins_words_with_blanks(tokenizer):
    assert tokenizer.decode([3, 28, 5]) == "w3 w28 w5"
    assert tokenizer.decode(encode(tokenizer, "w3 <eos> w4"), skip_special_tokens=False) == "w3 <eos> w4"


def test_an_unknown_word_is_refused_by_name(tokenizer):
    with pytest.raises(OpdctlError, match=r"'w99' is not in the model's vocabulary \(in 'w3 w99 w4'\)"):
        encode(tokenizer, "w3 w99 w4")


def test_an_unknown_token_is_refused_where_the_tokenizer_has_one():
    tokenizer = BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "ab": 5, "##c": 6})
    assert encode(tokenizer, "abc ab") == [5, 6, 5]
    with pytest.raises(OpdctlError, match="'zeta' is not in the model's vocabulary"):
        encode(tokenizer, "abc zeta")


@pytest.mark.parametrize("bad", ["", "two words", "w3"])
def test_words_that_could_not_be_told_apart_are_refused(bad):
    with pytest.raises(OpdctlError, match=f"words: {bad!r}"):
        word_tokenizer([*WORDS, bad])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(OpdctlError, match="no tokenizer"):
        load_tokenizer(tmp_path)


BROKEN = ["{", "{}", "[]", '{"model": 3}', '{"model": {"type": "WordLevel"}}', '{"model": {"type": "none"}}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_tokenizer_is_an_error_of_the_folder_with_a_remedy(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(OpdctlError, match=re.escape(str(tmp_path))) as caught:
        load_tokenizer(tmp_path)
    assert "copy the model's tokenizer files again" in caught.value.hint
    assert caught.value.__cause__ is None  # no calls in the log: the message says all
