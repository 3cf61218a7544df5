"""Tokens counted by a tokenizer.json alone: without transformers and PyTorch, which take seconds to import."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from tokenizers import Tokenizer

from opdctl.errors import OpdctlError
from opdctl.records import sha256


class RefusalsTold:
    """Where the library refuses a file, or a word that it does not know, it raises a bare Exception: that one type, and
    nothing derived from it, becomes an OpdctlError about `subject`."""

    def __init__(self, subject: object) -> None:
        self._subject = subject

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, calls: TracebackType | None
    ) -> None:
        if kind is Exception:
            told = f"{self._subject}: the tokenizer cannot be used: {error}"
            raise OpdctlError(told, hint="copy the model's tokenizer files again") from None


def count_tokens(file: Path, texts: Sequence[str]) -> list[int]:
    """Of each text, without the special tokens that a tokenizer would add. Raises OpdctlError for a file that cannot
    be read, and for words that it does not know."""
    with RefusalsTold(file):
        tokenizer = _opened(file, sha256(file))
        return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


@lru_cache(maxsize=1)
def _opened(file: Path, digest: str) -> Tokenizer:
    """`digest`: of the file, which may be another one by now."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
