"""Rows as token ids, by the model's own tokenizer and template: what is counted, and what a reader is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdctl.data.source import Example
from opdctl.settings import NewModel
from opdctl.tasks import Demonstration, Prompt


@dataclass(frozen=True)
class Span:
    """Adjacent tokens that are all trained on, or all not."""

    text: str
    tokens: int
    trained: bool


class Model:
    """The tokenizer of a folder, or of a model that is still to be made."""

    def __init__(self, folder: Path | None, new: NewModel | None = None) -> None:
        # PyTorch and transformers take seconds to import; rows are shown without a model too
        from opdctl.engine.checkpoint import load_vocabulary
        from opdctl.engine.rows import Renderer
        from opdctl.engine.tokenizer import closed_vocabulary, word_tokenizer

        if folder is not None:
            tokenizer, eos_ids, _ = load_vocabulary(str(folder))
        else:
            assert new is not None
            tokenizer, eos_ids = word_tokenizer(new.tokenizer.words), (2,)
        self.renderer = Renderer(tokenizer, eos_ids)
        # an unknown token stands for words that nobody meant: then ids are looked at, not only counted
        self._strict = closed_vocabulary(tokenizer) is not None or tokenizer.unk_token_id is not None

    def spans(self, example: Example, max_tokens: int) -> list[Span]:
        """The prompt, then what follows it in SFT; where there is nothing to imitate, the prompt alone.

        Raises OpdctlError for text that the vocabulary does not cover, and for a conversation without a template.
        """
        [prompt] = self.renderer.prompts([example.prompt], max_tokens)
        ids, learned = list(prompt), [False] * len(prompt)
        if example.demonstration is not None:
            [(completion, mask)] = self.renderer.demonstrations([example.demonstration], max_tokens)
            ids += completion
            learned += mask or [True] * len(completion)
        cuts = [at for at in range(len(ids)) if at == 0 or learned[at] != learned[at - 1]] + [len(ids)]
        # a piece decoded alone may lose the blank it begins with
        upto = [self._decode(ids[:cut]) for cut in cuts]
        return [
            Span(upto[i + 1][len(upto[i]) :], cuts[i + 1] - cuts[i], learned[cuts[i]]) for i in range(len(cuts) - 1)
        ]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.renderer.tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""

    def lengths(self, examples: Sequence[Example], max_observation_tokens: int) -> tuple[list[int], list[int]]:
        """Tokens of each prompt, and of what follows it: observations and EOS included, 0 where nothing follows."""
        prompts = self._count([self.renderer.text(example.prompt) for example in examples])
        follow = [0] * len(examples)
        plain = [i for i, example in enumerate(examples) if (d := example.demonstration) is not None and not d.turns]
        texts = [shown.completion for i in plain if (shown := examples[i].demonstration) is not None]
        for i, tokens in zip(plain, self._count(texts), strict=True):
            follow[i] = tokens + 1
        episodes = [
            (i, d) for i, example in enumerate(examples) if (d := example.demonstration) is not None and d.turns
        ]
        found = self.renderer.demonstrations([shown for _, shown in episodes], max_observation_tokens)
        for (i, _), (ids, _) in zip(episodes, found, strict=True):
            follow[i] = len(ids)
        return prompts, follow

    def _count(self, texts: Sequence[str]) -> list[int]:
        backend: Any = getattr(self.renderer.tokenizer, "backend_tokenizer", None)
        if self._strict or backend is None:
            return [len(ids) - 1 for ids in self.renderer.completions(texts)]
        return [len(encoded) for encoded in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def as_text(example: Example) -> list[Span]:
    """Without a model: the words, and which of them are trained on."""
    shown = example.demonstration
    prompt = prompt_words(example.prompt)
    spans = [Span(prompt + "\n", len(prompt.split()), False)]
    for text, observation in _written(shown) if shown is not None else ():
        spans.append(Span(text, len(text.split()), True))
        if observation:
            spans.append(Span(f"\n{observation}\n", len(observation.split()), False))
    return spans


def _written(shown: Demonstration) -> list[tuple[str, str]]:
    if not shown.turns:
        return [(shown.completion, "")]
    turns = []
    for turn in shown.turns:
        calls = [f"{call.name}({_arguments(call.arguments)})" for call in turn.calls]
        turns.append(("\n".join([turn.text, *calls]).strip(), turn.observation))
    return turns


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def prompt_words(prompt: Prompt) -> str:
    if not prompt.messages:
        return prompt.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)
