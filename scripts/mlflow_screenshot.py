"""A picture of the MLflow UI comparing two stages of a workspace: `docs/` shows one.

    python scripts/mlflow_screenshot.py WORKSPACE RUN:STAGE RUN:STAGE picture.png
    python scripts/mlflow_screenshot.py . 'kimi_k3:max[domain=general]' 'long:max[domain=general]' compare.png

Serves the workspace's store on a free loopback port, opens the page that compares the two runs in headless Chromium
and takes a screenshot.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from opdctl.store import Workspace

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

HOST = "mlflow.localhost"  # browsers take it for the loopback; the UI opens an assistant's panel for `localhost` itself
INSTALL = "apt-get update && apt-get install -y chromium"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workspace", type=Path)
    parser.add_argument("stages", nargs=2, metavar="RUN:STAGE")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", default="1600,1400", help="of the window, in pixels")
    parser.add_argument("--seconds", type=int, default=20, help="virtual time that the page gets to load and draw")
    given = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print(f"no chromium on the path; install it: {INSTALL}", file=sys.stderr)
        return 1
    database = Workspace(given.workspace.absolute()).tracking_database
    if not database.exists():
        print(f"{database} does not exist: nothing was tracked in this workspace yet", file=sys.stderr)
        return 1
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    try:
        runs = [find(client, *address.split(":", 1)) for address in given.stages]
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    with serve(database) as url:
        picture = photograph(browser, url + compare_path(runs), given.picture.absolute(), given.size, given.seconds)
    print(f"{picture}: {url + compare_path(runs)}")
    return 0


def find(client: "MlflowClient", run: str, stage: str) -> "Run":
    """The newest MLflow run of a stage."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(
        experiments, f"tags.run = '{run}' and tags.stage = '{stage}'", order_by=["attributes.start_time DESC"]
    )
    if not found:
        raise LookupError(f"stage {stage} of run {run} was not tracked")
    return found[0]


def compare_path(runs: "list[Run]") -> str:
    """Part after the host of the page that compares runs; lists are JSON, as the UI writes them."""
    quoted = [urllib.parse.quote('["' + '","'.join(values) + '"]') for values in (
        [run.info.run_id for run in runs],
        list(dict.fromkeys(run.info.experiment_id for run in runs)),
    )]  # fmt: skip
    return f"/#/compare-runs?runs={quoted[0]}&experiments={quoted[1]}"


@contextmanager
def serve(database: Path) -> Iterator[str]:
    """An MLflow server on a free loopback port, ended with all its workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--allowed-hosts", f"{HOST}:*,127.0.0.1:*", "--cors-allowed-origins", f"http://{HOST}:{port}"]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(f"{url}/health", server, seconds=90)
        yield f"http://{HOST}:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def wait_for(url: str, server: "subprocess.Popen[bytes]", seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"the MLflow server ended with {server.returncode}; try: opdctl ui")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"the MLflow server did not answer within {seconds:g} s")


def photograph(browser: str, url: str, picture: Path, size: str, seconds: int) -> Path:
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-sync", "--disable-component-update", "--disable-quic"]
        command += [f"--window-size={size}", f"--virtual-time-budget={seconds * 1000}", f"--user-data-dir={profile}"]
        done = subprocess.run(
            [*command, f"--screenshot={picture}", url], capture_output=True, text=True, timeout=300, check=False
        )
    if done.returncode or not picture.exists():
        raise SystemExit(f"{browser} took no picture (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    return picture


if __name__ == "__main__":
    sys.exit(main())
