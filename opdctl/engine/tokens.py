"""Tokens counted by a tokenizer.json alone: without transformers and PyTorch, which take seconds to import."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from opdctl.records import sha256


def count_tokens(file: Path, texts: Sequence[str]) -> list[int]:
    """Of each text, without the special tokens that a tokenizer would add. The library raises bare Exceptions: for a
    file that it cannot read, and for words that it does not know."""
    tokenizer = _opened(file, sha256(file))
    return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


@lru_cache(maxsize=1)
def _opened(file: Path, digest: str) -> Tokenizer:
    """`digest`: of the file, which may be another one by now."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
