"""Do two models speak one language? Vocabulary, width, special tokens, EOS, generation config, chat template.

A teacher or a reference scores the policy's token ids: where an id is another word to it, it praises what was never
meant, with a loss that looks well (trl#6457: same size, two ids swapped).
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from opdctl.backends.contract import StageSpec
from opdctl.gate.pairs import Pair, Party
from opdctl.verdicts import Outcome, Verdict

SHOWN = 5  # ids, tokens or lines that are named
ONE_TOKENIZER = "models are compared token by token: use one tokenizer for all"
RESIZE = (
    "save one of them again after resize_token_embeddings(N) of transformers, with the width of the other: rows behind "
    "the vocabulary are padding"
)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # checked elsewhere, or without meaning between two models
DRAWN = ("temperature", "top_p", "top_k", "min_p", "do_sample", "num_beams", "max_length", "max_new_tokens")
UNREAD = (*IDS, *DRAWN, "transformers_version", "_from_model_config", "cache_implementation", "use_cache")


def check_pair(pair: Pair) -> Iterator[Verdict]:
    """All that the files of two models say about it; what they do not say is left to the engine's own check."""
    yield from _vocabulary(pair)
    yield from _widths(pair)
    yield from _special(pair)
    yield from _eos(pair)
    yield from _generation(pair)
    yield from _template(pair)


def check_model(party: Party) -> Iterator[Verdict]:
    """Do config.json, weights and tokenizer of one model agree on its width? Decided on the rows that are stored
    (trl#2215, trl#3028): a width that only config.json has would be cut or filled silently."""
    promised, rows, vocabulary = party.files.vocab_size, party.files.rows, party.files.vocabulary
    values = {"rows": float(rows or promised or 0), "words": float(len(vocabulary.words) if vocabulary else 0)}
    if promised is not None and rows is not None and promised != rows:
        told = f"config.json says vocab_size {promised:,}, and the output matrix has {rows:,} rows"
        remedy = "set vocab_size to what the weights have, or save the model again"
        yield Verdict("width", party.label, Outcome.REFUSE, told, remedy, values)
    elif vocabulary is not None and (width := rows or promised) is not None and len(vocabulary.words) > width:
        told = f"{len(vocabulary.words):,} words, and {width:,} logits: the last words have none"
        remedy = (
            f"resize_token_embeddings({len(vocabulary.words)}) of transformers, or the tokenizer that belongs to it"
        )
        yield Verdict("width", party.label, Outcome.REFUSE, told, remedy, values)


# ------------------------------------------------------------------------------------------------------ vocabulary


def _vocabulary(pair: Pair) -> Iterator[Verdict]:
    first, second = pair.first.files.vocabulary, pair.second.files.vocabulary
    if first is None or second is None:
        return
    values = {"words": float(len(first.words)), "differing": 0.0}
    differing = [] if first is second else _differing(first.words, second.words)
    if differing:
        values["differing"] = float(len(differing))
        named = "; ".join(
            f"id {number} is {_shown(own)} to {pair.first.role} and {_shown(other)} to {pair.second.role}"
            for number, own, other in differing[:SHOWN]
        )
        more = f"; {len(differing) - SHOWN:,} more" if len(differing) > SHOWN else ""
        yield Verdict("vocabulary", pair.subject, Outcome.REFUSE, named + more, ONE_TOKENIZER, values)
    elif first.cuts and second.cuts and first.cuts != second.cuts:
        told = f"the same {len(first.words):,} words, but texts are cut into them by other rules (merges, normalizer)"
        remedy = "the policy's tokenizer counts; the other was trained on other cuts: use one tokenizer.json for both"
        yield Verdict("vocabulary", pair.subject, Outcome.WARN, told, remedy, values)
    else:
        yield Verdict("vocabulary", pair.subject, Outcome.GO, f"the same {len(first.words):,} words", values=values)


def _differing(first: Sequence[str | None], second: Sequence[str | None]) -> list[tuple[int, str | None, str | None]]:
    if first == second:
        return []
    both = enumerate(zip_longest(first, second))
    return [(number, own, other) for number, (own, other) in both if own != other]


def _shown(word: str | None) -> str:
    return "no word" if word is None else repr(word)


def _widths(pair: Pair) -> Iterator[Verdict]:
    widths = [party.files.rows or party.files.vocab_size for party in (pair.first, pair.second)]
    first, second = widths
    if first is None or second is None:
        return
    vocabulary = pair.first.files.vocabulary
    words = len(vocabulary.words) if vocabulary is not None else min(first, second)
    values = {"first": float(first), "second": float(second), "words": float(words)}
    if first == second:
        padding = f", {first - words:,} of them padding" if first > words else ""
        yield Verdict("width", pair.subject, Outcome.GO, f"{first:,} logits each{padding}", values=values)
        return
    told = f"{pair.first.role} gives {first:,} logits and {pair.second.role} {second:,}"
    padded = min(first, second) >= words
    if padded:
        told += f": both have all of the {words:,} words, and only the padding behind them differs"
    if pair.scores:
        yield Verdict("width", pair.subject, Outcome.REFUSE, told, RESIZE if padded else ONE_TOKENIZER, values)
    else:
        yield Verdict("width", pair.subject, Outcome.GO, f"{told}; it only samples", values=values)


# -------------------------------------------------------------------------------------------------- special tokens


def _special(pair: Pair) -> Iterator[Verdict]:
    """Source: special tokens that one model has and the other does not are among the causes of imbalance of single
    tokens in arXiv:2603.25562."""
    first, second = pair.first.files.vocabulary, pair.second.files.vocabulary
    if first is None or second is None:
        return
    told = []
    for token in dict.fromkeys([*first.special, *second.special]):
        own, other = first.special.get(token), second.special.get(token)
        if own != other:
            told.append(f"{token!r} is {_id(own)} to {pair.first.role} and {_id(other)} to {pair.second.role}")
    named, theirs = pair.first.files.named, pair.second.files.named
    for name in dict.fromkeys([*named, *theirs]):
        if name != "eos_token" and name in named and name in theirs and named[name] != theirs[name]:
            told.append(f"{name} is {named[name]!r} to {pair.first.role} and {theirs[name]!r} to {pair.second.role}")
    if told:
        more = f"; {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        remedy = "where one ends a turn or begins a thought, the teacher will judge it as plain text"
        yield Verdict("special_tokens", pair.subject, Outcome.WARN, "; ".join(told[:SHOWN]) + more, remedy)
    else:
        count = len(first.special)
        yield Verdict("special_tokens", pair.subject, Outcome.GO, f"the same {count}" if count else "none in either")


def _id(number: int | None) -> str:
    return "no special token" if number is None else f"special token {number}"


def _eos(pair: Pair) -> Iterator[Verdict]:
    """Where a rollout ends (ms-swift#9526, open-r1#603): the policy's ids end it, and a teacher that ends elsewhere
    calls its endings unlikely, so that completions grow until they are cut."""
    own, theirs = pair.first.files.eos_ids, pair.second.files.eos_ids
    if not own or not theirs or not pair.scores:
        return
    common = [token for token in own if token in theirs]
    listed = f"{pair.first.role} ends at {_ids(pair.first, own)}, {pair.second.role} at {_ids(pair.second, theirs)}"
    if not common:
        remedy = (
            f'set "eos_token_id" to the same ids in generation_config.json of both; or accept it, if '
            f"{pair.second.label} gives {own[0]} a chance where an answer ends"
        )
        yield Verdict("eos", pair.subject, Outcome.REFUSE, listed, remedy)
    elif not set(own) <= set(theirs):
        remedy = f"an answer that ends at {_ids(pair.first, [t for t in own if t not in theirs])} is not over to it"
        yield Verdict("eos", pair.subject, Outcome.WARN, listed, remedy)
    else:
        told = f"both end at {_ids(pair.first, own)}"
        yield Verdict("eos", pair.subject, Outcome.GO, told if set(own) == set(theirs) else listed)


def check_stops(spec: StageSpec, party: Party) -> Iterator[Verdict]:
    """vLLM inside verl stops at the EOS ids of generation_config.json, and without one at those of config.json: of a
    model that it rolls out, these must be all."""
    if spec.backend != "verl" or party.given.role not in ("init", "student") or party.new:
        return
    read = party.files.config if party.files.generation is None else party.files.generation
    given = read.get("eos_token_id")
    stops = [given] if isinstance(given, int) else list(given or [])
    if missing := [token for token in party.files.eos_ids if token not in stops]:
        told = (
            f"rollouts by vLLM would not stop at {_ids(party, missing)}: the files that it reads name {stops or 'none'}"
        )
        remedy = f'set "eos_token_id": {party.files.eos_ids} in its generation_config.json'
        yield Verdict("eos", party.label, Outcome.REFUSE, told, remedy)


def _ids(party: Party, ids: Sequence[int]) -> str:
    words = party.files.vocabulary.words if party.files.vocabulary is not None else []
    return ", ".join(f"{token} ({words[token]})" if 0 <= token < len(words) else str(token) for token in ids)


# ------------------------------------------------------------------------------------------------ settings of both


def _generation(pair: Pair) -> Iterator[Verdict]:
    """What generation_config.json has beside ids and sampling, which the pipeline sets: penalties and suppressed tokens
    bend a distribution, and no engine here applies them when it scores."""
    first, second = pair.first.files.generation, pair.second.files.generation
    if first is None or second is None:
        return
    differing = _differences(first, second, UNREAD)
    drawn = _differences(first, second, [key for key in {*first, *second} if key not in DRAWN])
    if differing:
        told = "; ".join(f"{key} is {own!r} and {other!r}" for key, own, other in differing[:SHOWN])
        remedy = "they are not read here; a model that needs them writes otherwise than it is scored"
        yield Verdict("generation_config", pair.subject, Outcome.WARN, told, remedy)
    else:
        named = ", ".join(key for key, _, _ in drawn)
        told = f"the same but for {named}, which the pipeline sets" if drawn else "the same"
        yield Verdict("generation_config", pair.subject, Outcome.GO, told)


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], without: Sequence[str]
) -> list[tuple[str, Any, Any]]:
    keys = [key for key in dict.fromkeys([*first, *second]) if key not in without]
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def _template(pair: Pair) -> Iterator[Verdict]:
    """Prompts are rendered by the policy's template, and the teacher scores what follows: one that was trained on other
    line breaks knows the prompt less well."""
    first, second = pair.first.files.template, pair.second.files.template
    if first == second:
        yield Verdict("chat_template", pair.subject, Outcome.GO, "the same" if first else "none in either")
        return
    if first is None or second is None:
        bare, other = (pair.first, pair.second) if first is None else (pair.second, pair.first)
        told = f"{bare.role} has none and {other.role} has one"
    else:
        lines = list(
            difflib.unified_diff(_lines(first), _lines(second), pair.first.label, pair.second.label, "", "", 0, "")
        )
        shown = [line for line in lines[2:] if not line.startswith("@@")]
        more = f"\n... {len(shown) - 2 * SHOWN} lines more" if len(shown) > 2 * SHOWN else ""
        told = "- and + differ:\n" + "\n".join(shown[: 2 * SHOWN]) + more
    remedy = f"{pair.first.label}'s template counts; give both the same chat_template, if both were trained on it"
    yield Verdict("chat_template", pair.subject, Outcome.WARN, told, remedy)


def _lines(template: str) -> list[str]:
    """With their ends in view: a newline is a difference."""
    return [repr(line)[1:-1] for line in template.splitlines(keepends=True)]
