"""Completions from a server that speaks OpenAI's API, by the standard library's HTTP client."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NoReturn

from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import Endpoint

FIRST_PAUSE_S = 1.0  # before the second attempt; doubled each time
LONGEST_PAUSE_S = 30.0
SHOWN = 200  # characters of a server's answer in a message
Messages = Sequence[Mapping[str, str]]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Asks one endpoint. The key goes from the environment into a header, and into no message.

    Raises StageRefused where the key's variable is not set.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._key = os.environ.get(endpoint.key_variable, "") if endpoint.key_variable else ""
        if endpoint.key_variable and not self._key:
            raise StageRefused(
                f"grader.endpoint.key_variable: the environment variable {endpoint.key_variable} is not set",
                hint="set it to the API key, or leave key_variable out where the server wants none",
            )
        self._opener = urllib.request.build_opener(_NoRedirect)

    def complete(
        self, prompts: Sequence[str | Messages], *, max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[str]:
        """What the model writes after each prompt; messages go to chat/completions, text to completions.

        Raises StageRefused where the server refuses a request or answers with something else, StageFailed where it
        does not answer after all attempts.
        """
        common = {"model": self.endpoint.model, "max_tokens": max_tokens, "temperature": temperature}

        def ask(prompt: str | Messages, seed: int) -> str:
            if isinstance(prompt, str):
                return self._text("completions", {**common, "seed": seed, "prompt": prompt})
            return self._text("chat/completions", {**common, "seed": seed, "messages": [dict(m) for m in prompt]})

        with ThreadPoolExecutor(self.endpoint.concurrent) as pool:
            asked = [pool.submit(ask, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
            try:
                return [answer.result() for answer in asked]
            finally:
                for answer in asked:
                    answer.cancel()  # after a refusal there is no use in asking on

    def _text(self, path: str, payload: Mapping[str, Any]) -> str:
        url = f"{self.endpoint.url.rstrip('/')}/{path}"
        body = self._post(url, json.dumps(payload).encode())
        try:
            choice = json.loads(body)["choices"][0]
            text = choice["message"]["content"] if path.startswith("chat/") else choice["text"]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, LookupError, TypeError):
            self._refuse(f"{url} answered with what is no completion: {self._shown(body)}")
        return text

    def _post(self, url: str, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        pause, trouble = FIRST_PAUSE_S, ""
        for attempt in range(self.endpoint.attempts):
            if attempt:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                request = urllib.request.Request(url, data, headers)
                with self._opener.open(request, timeout=self.endpoint.timeout_s) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                trouble = f"{error.code} {error.reason}"
                if error.code != 429 and error.code < 500:
                    self._refuse(f"{url} refused: {trouble}: {self._shown(_rest(error))}")
            except (OSError, http.client.HTTPException) as error:  # no connection, silence, an answer cut short
                trouble = str(error) or type(error).__name__
        raise StageFailed(
            f"{url} did not answer after {self.endpoint.attempts} attempts: {self._shown(trouble.encode())}",
            hint="see that the server is up, and raise grader.endpoint.timeout_s or attempts; resume by running again",
        )

    def _refuse(self, told: str) -> NoReturn:
        raise StageRefused(f"grader.endpoint: {told}", hint="see grader.endpoint's url, model and key_variable")

    def _shown(self, body: bytes) -> str:
        text = body.decode(errors="replace")
        return (text.replace(self._key, "***") if self._key else text)[:SHOWN].strip()  # some servers repeat the key


def _rest(answer: IO[bytes]) -> bytes:
    try:
        return answer.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return b""
