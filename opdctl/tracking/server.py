"""The way to MLflow: a client that works, and what is to be thought of an error."""

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdctl.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# Only where the user has not said otherwise. A server that is down is tried again later, by us.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",  # seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # where one JSON document is to stand
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # it prints a traceback for every error that it also raises
}
# What was sent twice, because the answer to the first was lost, would be there twice: we look before we send again.
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
SETUP_S = 60.0  # that another process gets to set up the database
TRIES = 3  # of one thing alone, at a server that takes others
AWAY = (408, 425, 429, 502, 503, 504)  # HTTP states of a server that may answer later
PAGE = 1000  # runs in one answer
# What MLflow tells in many words, of which the address, often a secret, is left out
SIGNS = [
    (re.compile(sign), sentence)
    for sign, sentence in {
        r"failed with error code 401\b": "it refuses the user or the password (401)",
        r"failed with error code 403\b": "the user may not do this there (403): see user and password",
        r"failed with error code 404\b": "nothing is at this address (404): is it an MLflow server?",
        r"Connection refused": "the connection is refused: nothing listens at this host and port",
        r"Failed to resolve|Name or service not known": "there is no host of this name",
        r"unsupported URI|filesystem tracking backend": "the address has no scheme that MLflow knows, such as http://",
    }.items()
]


class Unreachable(Exception):
    """The tracking store does not answer as it should; the text says how."""

    def __init__(self, told: str, *, away: bool = True) -> None:
        """`away`: it was not even answered, or is asked to come again; then nobody knows whether it came through."""
        super().__init__(told)
        self.away = away


@dataclass(frozen=True)
class Target:
    """Where a pipeline run is tracked."""

    uri: str
    shown: str  # to the user: without its secrets
    database: Path | None  # the workspace's own SQLite file, if that is what `uri` is
    artifacts: str | None  # where a new experiment keeps artifacts; None: where the server wants them
    experiment: str
    pipeline: str
    run: str
    pipeline_run: str  # unique id of this pipeline run
    resolved: Mapping[str, Any]


def connect(uri: str, database: Path | None) -> "MlflowClient":
    """A client; a new SQLite store is set up by one process at a time, for two at once break it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[RETRIES] = "0"
    for library in ("alembic", "mlflow"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    from mlflow import MlflowClient

    if database is None:
        return MlflowClient(tracking_uri=uri)
    with open(database.with_suffix(".lock"), "w") as handle:
        deadline = time.monotonic() + SETUP_S
        while not _locked(handle.fileno()):
            if time.monotonic() > deadline:
                raise Unreachable(f"another process has been setting {database} up for {SETUP_S:.0f} s")
            time.sleep(0.1)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
        return client


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def search_runs(client: "MlflowClient", experiments: list[str], filter_string: str) -> Iterator["Run"]:
    """All of them, page by page."""
    token: str | None = None
    while True:
        page = client.search_runs(experiments, filter_string, max_results=PAGE, page_token=token)
        yield from page
        if not (token := page.token):
            return


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Whatever goes wrong inside becomes Unreachable. MLflow raises errors of its own, of its database, of the network
    and of whatever keeps its files (boto3's, ...), and no training, nor the thread that tells of it, ends for them."""
    try:
        yield
    except Unreachable:
        raise
    except Exception as error:
        told = redact(next(iter(str(error).splitlines()), "")) or type(error).__name__
        known = next((sentence for sign, sentence in SIGNS if sign.search(str(error))), told)
        raise Unreachable(known, away=_is_away(error)) from error


def probe(client: "MlflowClient", run_id: str) -> None:
    """Raises what is in the way where nothing can be written to the run now: a server away, a locked database, a run
    that was deleted. Else what was refused before was refused for its own sake."""
    client.set_tag(run_id, "opdctl.probe", str(time.time_ns()))


def send(client: "MlflowClient", run_id: str, items: list[Any], log: Callable[[list[Any]], object]) -> list[str]:
    """Call `log` with the items, in few requests; those that the server takes from nobody are left out: why, a line
    each. Raises where it is the server that cannot."""
    if not items:
        return []
    told = ""
    for _ in range(1 if len(items) > 1 else TRIES):
        try:
            with asking():
                log(items)
        except Unreachable as error:
            if error.away:
                raise
            told = str(error)
            probe(client, run_id)
        else:
            return []
    if len(items) == 1:
        return [f"{items[0].key}: {told}"]
    middle = len(items) // 2
    return [line for half in (items[:middle], items[middle:]) for line in send(client, run_id, half, log)]


def _is_away(error: BaseException | None) -> bool:
    try:
        from mlflow.exceptions import MlflowException
        from requests import HTTPError, RequestException
    except ImportError:  # nothing can be asked
        return True

    if isinstance(error, HTTPError) and error.response is not None:
        return error.response.status_code in AWAY
    if isinstance(error, MlflowException):
        return error.error_code in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED") or _is_away(
            error.__cause__ or error.__context__
        )
    return isinstance(error, RequestException | ConnectionError | TimeoutError)


def end_stale(client: "MlflowClient", living: Callable[[], Collection[str]], *, dry_run: bool = False) -> list[str]:
    """Mark as killed the runs of ours that are RUNNING without being one of the pipeline runs `living`; their names.
    Who lives is asked afterwards: whoever has begun since is among them."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments(max_results=PAGE)]
    found = list(search_runs(client, experiments, "attributes.status = 'RUNNING'"))
    spared, ended = {"", *living()}, []  # without the tag: not ours
    for run in found:
        tags = run.data.tags
        if tags.get("opdctl.pipeline_run", "") in spared:
            continue
        ended.append(f"{tags.get('opdctl.run', '')} {tags.get('stage', '')}".strip() or run.info.run_id)
        if not dry_run:
            client.set_tag(run.info.run_id, "opdctl.message", "nobody works on it any more: told by opdctl repair")
            client.set_terminated(run.info.run_id, "KILLED")
    return ended
