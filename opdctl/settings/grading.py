"""Generative rewards: a language model judges what no rule can."""

import re
import string
from typing import Annotated, Literal

from pydantic import Field, model_validator

from opdctl.fields import Count, NonNegative, Positive, Settings
from opdctl.secrets import reveal

FIELDS = {"rubric": ("completion",), "pairwise": ("first", "second")}  # what a template has to show
COMMON = ("prompt", "answer")  # what it may show: the task's prompt, and an answer that the task holds right


class Endpoint(Settings):
    """A server that speaks OpenAI's completions API, such as `vllm serve`."""

    url: str  # up to and with /v1
    model: str
    key_variable: str = ""  # environment variable that holds the API key; the key itself is written nowhere
    timeout_s: Positive = 60.0  # of one request
    attempts: Count = 5  # a request is repeated, ever later, where the server is busy (429), fails (5xx) or is silent
    concurrent: Count = 8  # requests under way at once

    @model_validator(mode="after")
    def _plain(self) -> "Endpoint":
        # of the whole, so that no message repeats what may be a password
        if "@" in self.url:
            raise ValueError(
                "url: has a user or a password in it; name the environment variable of the key: key_variable"
            )
        if "@" in reveal(self.url):
            raise ValueError("url: the variable it refers to has a user or a password in it; leave them out")
        if not re.match(r"https?://\S+$", reveal(self.url)):
            raise ValueError("url: must begin with http:// or https:// and have no blanks")
        return self


class Grader(Settings):
    """A generative reward model (`opdctl/engine/grader.py`).

    The template is `str.format`'s: {prompt} and {answer}, with {completion} for a rubric, {first} and {second} for a
    pair; a brace is written twice. A verdict is what the judge's text ends with. In a pair its score is what the first
    completion wins, 0 to 1; the second wins the rest.
    """

    tasks: Annotated[list[str], Field(min_length=1)]  # whose completions it grades; the others keep their verifier
    mode: Literal["rubric", "pairwise"]  # pairwise: all pairs of a group, both ways round; the reward is the share won
    by: Literal["actor", "model", "endpoint"]  # the model that wrote them, the input role `grader`, or a server
    template: str
    verdicts: Annotated[dict[str, float], Field(min_length=2)]  # what the judge may write -> score
    max_tokens: Count  # of what the judge writes
    temperature: NonNegative = 0.0  # 0: greedy
    endpoint: Endpoint | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "Grader":
        needed, known = FIELDS[self.mode], (*COMMON, *FIELDS[self.mode])
        parts = [part for part in string.Formatter().parse(reveal(self.template)) if part[1] is not None]
        used = [field for _, field, _, _ in parts if field is not None]
        if dressed := [field for _, field, form, conversion in parts if form or conversion]:
            raise ValueError(f"template: {{{dressed[0]}}} is filled in as it is: leave out what follows its name")
        if strange := [field for field in used if field not in known]:
            fields = ", ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"template: mode {self.mode} knows {fields}, and not {{{strange[0]}}}")
        if absent := [field for field in needed if field not in used]:
            raise ValueError(f"template: mode {self.mode} needs {{{absent[0]}}}")
        if any(verdict != verdict.strip() or not verdict for verdict in self.verdicts):
            raise ValueError("verdicts: one is empty or has blanks at its ends")
        if len(set(self.verdicts.values())) < 2:
            raise ValueError("verdicts: all have the same score, so that no completion could be told from another")
        if self.mode == "pairwise" and not all(0 <= score <= 1 for score in self.verdicts.values()):
            raise ValueError("verdicts: in mode pairwise a score is what the first wins, from 0 to 1")
        if (self.endpoint is None) == (self.by == "endpoint"):
            told = "needs `endpoint`" if self.by == "endpoint" else "has no use for `endpoint`"
            raise ValueError(f"by: {self.by} {told}")
        return self
