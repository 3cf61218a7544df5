"""Conversations as tokens: what a model is asked, and what stands between two of its turns.

An episode is tokens in, tokens out: what the model wrote is never rendered or tokenized again, so that the tokens
trained on are the ones that were drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from opdctl.engine.tokenizer import Tokenizer, closed_vocabulary, encode
from opdctl.errors import StageRefused
from opdctl.tasks import Prompt
from opdctl.tasks.call_formats import shows_tools, with_tools

_TURN = "\u241eturn\u241e"  # stands for what the model wrote
_CUT = " ... (cut)"


def prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """What is tokenized: the prompt's own text, or its messages and tools under the tokenizer's chat template."""
    if not prompt.messages:
        return prompt.text
    template = tokenizer.chat_template
    if not template:
        raise StageRefused(
            "template: chat, but the model's tokenizer has no chat template",
            hint="set template: raw for the task, or use a model whose tokenizer_config.json has a chat_template",
        )
    shown = {"tools": list(prompt.tools)} if prompt.tools and shows_tools(template) else {}
    messages = with_tools(prompt.messages, prompt.tools, template)
    return _rendered(tokenizer, messages, **shown)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], **shown: Any) -> str:
    """Up to where the model's turn begins. Raises StageRefused for what the template has not, or is broken at."""
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **shown))
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise StageRefused(
            f"the model's chat template cannot render a conversation of {roles}: {error.message}",
            hint="put a chat_template.jinja that can into the model's folder, or set template: raw for the task",
        ) from error


def observation_ids(tokenizer: Tokenizer, eos_ids: Sequence[int], observation: str, max_tokens: int) -> list[int]:
    """Tokens between the EOS of the model's turn and its next turn: those of `observation_text`."""
    return encode(tokenizer, observation_text(tokenizer, eos_ids, observation, max_tokens))


def observation_text(tokenizer: Tokenizer, eos_ids: Sequence[int], observation: str, max_tokens: int) -> str:
    """What stands between the EOS of the model's turn and its next turn.

    With a chat template: the rest of its end of turn, the observation as role `tool` (`user` where the template knows
    no tools), and what begins the model's turn. Without one: the observation alone. An observation of more than
    `max_tokens` tokens is cut, and says so where the vocabulary can. Halves of surrogate pairs, which a model can
    write as escapes and no tokenizer takes, become `?`.
    """
    observation = observation.encode(errors="replace").decode()
    observation = _cut(tokenizer, _plain(tokenizer, observation), max_tokens)
    if not tokenizer.chat_template:
        return observation
    role = "tool" if shows_tools(tokenizer.chat_template) else "user"
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _TURN},
        {"role": role, "content": observation},
    ]
    rendered = _rendered(tokenizer, turns)
    after = rendered[rendered.rindex(_TURN) + len(_TURN) :]
    for token in map(str, tokenizer.convert_ids_to_tokens(list(eos_ids))):
        if after.startswith(token):
            after = after.removeprefix(token)
            break
    return after


def _cut(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    ids = encode(tokenizer, text)
    if len(ids) <= max_tokens:
        return text
    told = "" if closed_vocabulary(tokenizer) is not None else _CUT
    room = max(0, max_tokens - len(encode(tokenizer, told)))
    return str(tokenizer.decode(ids[:room])).rstrip("\ufffd") + told


def _plain(tokenizer: Tokenizer, text: str) -> str:
    """The text without special tokens: a file or a program's output must not end a turn or begin another."""
    if closed_vocabulary(tokenizer) is not None:
        return text
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text
