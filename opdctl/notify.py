"""Tells a command or a webhook that a stage failed, a run stopped or finished, or the gate refused.

Both get one JSON document: `event` (failed, stopped, refused, finished), `stage` (empty for the whole run), `message`,
`time`, and what the caller adds to each. What a command prints goes nowhere, and an answer is not read: either may
repeat a secret that it was given.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any

from opdctl.errors import ConfigError
from opdctl.secrets import redact, reveal
from opdctl.settings import Notify, NotifyOn


class Notifier:
    """Sends from a thread of its own: nothing waits for it, and nothing fails for its sake."""

    def __init__(self, settings: Notify, context: Mapping[str, Any]) -> None:
        self._settings, self._context = settings, context
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._complaints: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._told = self._sent = 0  # each is counted by one thread
        self._given_up = threading.Event()
        self._running = threading.Lock()  # held while `_process` is set, or ended
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)

    def tell(self, what: NotifyOn, stage: str, message: str) -> None:
        """`stage` is empty for the whole run."""
        settings = self._settings
        if what not in settings.events or not (settings.command or settings.webhook):
            return
        when = datetime.now(UTC).isoformat(timespec="seconds")
        told = {"event": what, "stage": stage, "message": redact(message), "time": when, **self._context}
        self._told += 1
        self._queue.put(json.dumps(told).encode())
        if self._thread.ident is None:
            self._thread.start()

    def close(self, give_up: Callable[[], bool] = lambda: False) -> list[str]:
        """Waits, at most a second more than `timeout_s` and not once `give_up`, until all is sent; what could not be
        sent, a line each. Nothing that was started is left running."""
        if self._thread.ident is not None:
            self._queue.put(None)
            deadline = time.monotonic() + self._settings.timeout_s + 1.0
            while self._thread.is_alive() and time.monotonic() < deadline and not give_up():
                self._thread.join(0.1)
            self._given_up.set()
            with self._running:
                self._end()
        complaints: list[str] = []
        while not self._complaints.empty():
            complaints.append(self._complaints.get())
        if left := self._told - self._sent:
            complaints.append(f"notify: {left} of {self._told} messages were not sent in time (notify.timeout_s)")
        return list(dict.fromkeys(complaints))

    # ------------------------------------------------------------------ the thread's side

    def _work(self) -> None:
        while (document := self._queue.get()) is not None and not self._given_up.is_set():
            for name, given, send in (
                ("command", self._settings.command, self._run),
                ("webhook", self._settings.webhook, self._post),
            ):
                if given and (problem := send(document)):
                    self._complaints.put(f"notify.{name}: {redact(problem)}")
            self._sent += 1

    def _run(self, document: bytes) -> str:
        """What went wrong, else empty."""
        limit = self._settings.timeout_s
        with self._running:
            if self._given_up.is_set():
                return ""
            try:
                process = self._process = subprocess.Popen(
                    reveal(self._settings.command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # so that its children can be ended with it
                )
            except (OSError, ValueError, ConfigError) as error:
                return f"could not be started: {error}"
        try:
            process.communicate(document, timeout=limit)
        except subprocess.TimeoutExpired:
            with self._running:
                self._end()
            process.wait()
            return f"did not end within {limit:g} s (notify.timeout_s) and was killed"
        finally:
            with self._running:
                self._process = None
        return f"ended with exit code {process.returncode}" if process.returncode else ""

    def _end(self) -> None:
        """The command that is running, and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _post(self, document: bytes) -> str:
        settings = self._settings
        try:
            request = urllib.request.Request(reveal(settings.webhook), document, {"Content-Type": "application/json"})
            if (name := settings.webhook_token_env) is not None:
                if not os.environ.get(name):
                    return f"the environment variable {name} (notify.webhook_token_env) is not set"
                request.add_header("Authorization", f"Bearer {os.environ[name]}")
            _OPENER.open(request, timeout=settings.timeout_s).close()
        except urllib.error.HTTPError as error:
            error.close()
            return f"the server answered {error.code}"
        except (OSError, HTTPException, ValueError, ConfigError) as error:
            return f"could not be sent: {type(error).__name__}: {error}"
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
