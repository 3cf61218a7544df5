"""A model's folder as its files tell it: vocabulary, special tokens, templates, lengths, shapes; no weight is loaded.

Formats: tokenizer.json of the `tokenizers` library, the JSON files of `transformers`, and the head of safetensors files
(8 bytes of its length, little endian, then JSON: name -> dtype, shape, data_offsets).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from opdctl.errors import OpdctlError
from opdctl.records import read_json, sha256
from opdctl.settings import NewModel
from opdctl.weight_files import StoredTensor, tensors_by_file

TOKENIZER = "tokenizer.json"
OUTPUT, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
CUTS = ("normalizer", "pre_tokenizer")  # and merges, scores and added tokens: how a text is cut into words
LATER = {"use_regex": True}  # of ByteLevel: a key that files did not always have, and what its absence means
WITHIN = ("su", "longrope", "llama3")  # ropes whose max_position_embeddings is the stretched length already
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer.json says."""

    words: Sequence[str | None]  # of each id; None for ids without one
    special: Mapping[str, int]  # tokens that stand for no text of their own -> id
    cuts: str = ""  # a digest of how texts become words

    @cached_property
    def ids(self) -> Mapping[str, int]:
        return {word: number for number, word in enumerate(self.words) if word is not None}


class Files:
    """Of one folder; each file is read when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Of the text, where a model reads more than text."""
        found = read_json(self.folder / "config.json") or {}
        text = found.get("text_config")
        return {**found, **text} if isinstance(text, dict) else found

    @cached_property
    def generation(self) -> Mapping[str, Any] | None:
        return read_json(self.folder / "generation_config.json")

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return read_json(self.folder / "tokenizer_config.json") or {}

    @cached_property
    def vocabulary(self) -> "Vocabulary | None":
        """Of tokenizer.json; None for other formats, which only a tokenizer's own library reads."""
        file = self.folder / TOKENIZER
        return _vocabulary(file) if file.is_file() else None

    def tokens(self, texts: Sequence[str]) -> list[int] | None:
        """How many each of them has, special ones that a tokenizer would add left out; None where tokenizer.json does
        not tell."""
        file = self.folder / TOKENIZER
        if not file.is_file():
            return None
        from opdctl.engine.tokens import count_tokens

        try:
            return count_tokens(file, texts)
        except OpdctlError:  # told by whoever asks the model
            return None

    @cached_property
    def named(self) -> Mapping[str, str]:
        """bos_token, eos_token, ... -> the token; as transformers does, by special_tokens_map.json in older folders."""
        told = self.tokenizer_config
        if "added_tokens_decoder" not in told:
            told = {**told, **(read_json(self.folder / "special_tokens_map.json") or {})}
        given = {name: told.get(name) for name in NAMED}
        plain = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
        return {name: str(token) for name, token in plain.items() if token}

    @cached_property
    def eos(self) -> Mapping[str, Sequence[int]]:
        """File -> EOS ids, in the order in which `load_policy` joins them; files that name none are left out."""
        name = self.named.get("eos_token")
        own = self.vocabulary.ids.get(name) if self.vocabulary is not None and name else None
        listed = {
            "tokenizer_config.json": own,
            "generation_config.json": (self.generation or {}).get("eos_token_id"),
            "config.json": self.config.get("eos_token_id"),
        }
        return {file: [ids] if isinstance(ids, int) else list(ids) for file, ids in listed.items() if ids is not None}

    @property
    def eos_ids(self) -> list[int]:
        return list(dict.fromkeys(token for ids in self.eos.values() for token in ids))

    @cached_property
    def template(self) -> str | None:
        """The chat template; of several the one called default."""
        file = self.folder / "chat_template.jinja"
        found = file.read_text() if file.is_file() else self.tokenizer_config.get("chat_template")
        if isinstance(found, list):
            found = next((one["template"] for one in found if one.get("name") == "default"), None)
        return str(found) if found else None

    @property
    def vocab_size(self) -> int | None:
        """Logits that config.json promises."""
        size = self.config.get("vocab_size")
        return int(size) if size is not None else None

    @property
    def rows(self) -> int | None:
        """Of the output matrix as it is stored; of the embeddings where both are one. None without safetensors."""
        names = sorted(self.tensors, key=len)
        found = next((n for n in names if n.endswith(OUTPUT)), next((n for n in names if n.endswith(EMBEDDINGS)), None))
        return self.tensors[found].shape[0] if found is not None else None

    def positions(self, *, scaled: bool) -> int | None:
        """Tokens that a sequence may have; `scaled`: as vLLM stretches them (0.28.0, `_get_and_verify_max_len` of its
        config/model.py). None: not said."""
        limit = self.config.get("max_position_embeddings") or self.config.get("n_positions")
        if limit is None or not scaled or "gemma3" in str(self.config.get("model_type")):
            return int(limit) if limit is not None else None
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type")
        if kind in WITHIN or not rope.get("factor"):
            return int(limit)
        start = rope.get("original_max_position_embeddings") if kind == "yarn" else None
        return int((start or limit) * rope["factor"])

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Name -> where it is; empty without safetensors, or where they are not whole."""
        try:
            return {name: one for held in tensors_by_file(self.folder).values() for name, one in held.items()}
        except OpdctlError:  # told by whoever reads the weights
            return {}


class NewFiles(Files):
    """A model that is still to be made: it has no folder, and its settings say all."""

    def __init__(self, model: NewModel, workspace: Path) -> None:
        super().__init__(workspace / "\0")  # no folder is called so
        self._model = model
        self.config = {
            **model.shape.model_dump(),
            "vocab_size": len(model.tokenizer.words),
            "eos_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 0,
        }
        pad, begin, end = model.tokenizer.words[:3]
        self.generation = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
        self.tokenizer_config = {"pad_token": pad, "bos_token": begin, "eos_token": end}
        self.vocabulary = Vocabulary(list(model.tokenizer.words), {pad: 0, begin: 1, end: 2})
        self.template, self.tensors = None, {}

    def tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]


_READ: dict[str, Vocabulary | None] = {}  # sha256 of a tokenizer.json -> what it says: nine teachers share one
_KEPT = 4


def _vocabulary(file: Path) -> Vocabulary | None:
    digest = sha256(file)
    if digest not in _READ:
        while len(_READ) >= _KEPT:
            del _READ[next(iter(_READ))]
        _READ[digest] = _read(read_json(file) or {})
    return _READ[digest]


def _read(tokenizer: Mapping[str, Any]) -> Vocabulary | None:
    """BPE, WordLevel and WordPiece list word -> id, Unigram its words in the order of the ids."""
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    listed = model.get("vocab")
    if isinstance(listed, list):
        by_id = {number: str(entry[0]) for number, entry in enumerate(listed)}
    elif isinstance(listed, dict):
        by_id = {int(number): str(word) for word, number in listed.items()}
    else:
        return None
    by_id |= {int(token["id"]): str(token["content"]) for token in added}
    words: list[str | None] = [None] * (max(by_id, default=-1) + 1)
    for number, word in by_id.items():
        words[number] = word
    special = {str(token["content"]): int(token["id"]) for token in added if token.get("special")}
    scores = listed if isinstance(listed, list) else None
    whole = sorted(str(token["content"]) for token in added if not token.get("special"))
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or []]
    cuts = json.dumps([merges, scores, whole, *(_spelt_out(tokenizer.get(part)) for part in CUTS)], sort_keys=True)
    return Vocabulary(words, special, hashlib.sha256(cuts.encode()).hexdigest())


def _spelt_out(part: Any) -> Any:
    """As tokenizers of today writes it: a file that was only saved again is no other one."""
    if isinstance(part, list):
        return [_spelt_out(one) for one in part]
    if not isinstance(part, dict):
        return part
    later = LATER if part.get("type") == "ByteLevel" else {}
    return later | {key: _spelt_out(value) for key, value in part.items()}
