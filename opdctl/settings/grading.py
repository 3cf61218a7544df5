"""Generative rewards: a language model judges what no rule can."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, NonNegative, Positive, Settings


class Endpoint(Settings):
    """A server that speaks OpenAI's completions API, such as `vllm serve`."""

    url: str  # up to and with /v1
    model: str
    key_variable: str = ""  # environment variable that holds the API key; the key itself is written nowhere
    timeout_s: Positive = 60.0


class Grader(Settings):
    """A generative reward model. Templates fill in {prompt}, {completion} and {answer}; for pairs {first}, {second}."""

    tasks: Annotated[list[str], Field(min_length=1)]  # whose completions it grades; the others keep their verifier
    mode: Literal["rubric", "pairwise"]  # pairwise: all pairs of a group, both ways round; the reward is the share won
    by: Literal["actor", "model", "endpoint"]  # the policy under training, the input role `grader`, or a server
    template: str
    verdicts: Annotated[dict[str, float], Field(min_length=1)]  # what the model may write -> score
    max_tokens: Count  # of a verdict
    temperature: NonNegative = 0.0  # 0: greedy
    endpoint: Endpoint | None = None
