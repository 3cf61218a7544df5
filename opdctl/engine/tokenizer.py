"""Tokenizers: made from a word list or loaded; text to ids without silent loss."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer as WordLevelTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from opdctl.engine.tokens import RefusalsTold
from opdctl.errors import OpdctlError

Tokenizer: TypeAlias = PreTrainedTokenizerBase


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token a word, words separated by blanks; the first three are padding, begin and end of sequence.

    Raises OpdctlError for a word that is empty, holds a blank or occurs twice.
    """
    bad = sorted(word for word, times in Counter(words).items() if word.split() != [word] or times > 1)
    if bad:
        raise OpdctlError(
            f"model.tokenizer.words: {', '.join(map(repr, bad))}: every word must be there once and without blanks"
        )
    backend = WordLevelTokenizer(WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = WhitespaceSplit()
    pad, begin, end = words[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; never runs code from it. Raises OpdctlError when it has none."""
    if not any(
        (Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        raise OpdctlError(
            f"{path}: no tokenizer (tokenizer.json, tokenizer.model or tokenizer_config.json)",
            hint="copy the tokenizer files of the model beside its weights",
        )
    try:
        with RefusalsTold(path):
            tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        raise OpdctlError(
            f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {error}",
            hint="copy the model's tokenizer files again, or install what the message asks for",
        ) from None
    for where in ("is_local", "local_files_only"):  # how it was loaded would be written into the next checkpoint
        tokenizer.init_kwargs.pop(where, None)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, without added special tokens; see `encode_batch`."""
    return encode_batch(tokenizer, [text])[0]


def closed_vocabulary(tokenizer: Tokenizer) -> set[str] | None:
    """The words of a word-level tokenizer, besides which a model can write none; None for one that writes any text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return set(tokenizer.get_vocab()) if backend is not None and isinstance(backend.model, WordLevel) else None


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, without added special tokens.

    Raises OpdctlError for text that the vocabulary does not cover, naming it: an unknown token in its place would
    make different texts equal.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and isinstance(backend.model, WordLevel):
        known = tokenizer.get_vocab()
        for text in texts:
            for word in text.split():
                if word not in known:
                    raise _unknown(word, text)
    if not texts:
        return []
    with RefusalsTold(tokenizer.name_or_path):
        encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    ids: list[list[int]] = [[int(token) for token in row] for row in encoded]
    if unknown is not None:
        for text, row in zip(texts, ids, strict=True):
            if unknown in row and str(tokenizer.unk_token) not in text:
                raise _unknown(_piece(tokenizer, text, row.index(unknown)), text)
    return ids


def _piece(tokenizer: Tokenizer, text: str, index: int) -> str:
    """The part of a text that became token `index`; the whole text where the tokenizer keeps no offsets."""
    if not tokenizer.is_fast:
        return text
    start, end = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][index]
    return text[start:end]


def _unknown(piece: str, text: str) -> OpdctlError:
    return OpdctlError(
        f"{piece!r} is not in the model's vocabulary (in {text[:80]!r})",
        hint="add it to model.tokenizer.words of a new model, or correct the task's text",
    )
