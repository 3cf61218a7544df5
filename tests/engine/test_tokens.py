"""Tokens are counted as the model's own library counts them, and without it."""

import subprocess
import sys

import pytest
from gate.models import WORDS, save

from opdctl.engine.tokenizer import encode, load_tokenizer
from opdctl.engine.tokens import RefusalsTold, count_tokens
from opdctl.errors import OpdctlError


def test_counts_are_those_of_the_models_own_tokenizer(tmp_path):
    folder, texts = save(tmp_path / "model"), ["", "a", " ".join(WORDS[3:])]
    tokenizer = load_tokenizer(folder)
    counted = count_tokens(folder / "tokenizer.json", texts)
    assert counted == [len(encode(tokenizer, text)) for text in texts] == [0, 1, 5]


def test_what_the_library_refuses_is_an_error_and_what_is_a_bug_stays_one(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OpdctlError, match="tokenizer cannot be used"):
        count_tokens(tmp_path / "tokenizer.json", ["a"])
    with pytest.raises(ZeroDivisionError), RefusalsTold(tmp_path):
        raise ZeroDivisionError


def test_neither_pytorch_nor_transformers_is_imported_for_it():
    told = "import sys, opdctl.engine.tokens, opdctl.gate; print({'torch', 'transformers'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True).stdout == "set()\n"
