"""What every test gets: one thread a process, no network but this machine's own, a workspace to run in."""

import os
import socket
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
for stray in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
    os.environ.pop(stray, None)

import pytest  # noqa: E402 -- after the environment
from hypothesis import settings  # noqa: E402

from opdctl.backends import embedded  # noqa: E402
from opdctl.supervisor import Supervisor  # noqa: E402

collect_ignore = ["verl_env"]  # run by verl's interpreter: `make test-verl`
LOOPBACK = ("127.", "::1", "localhost")

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def _only_loopback(connect):
    def guarded(self, address):
        remote = self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(LOOPBACK)
        if remote:
            raise OSError(f"a test reaches for {address}: tests have no network")
        return connect(self, address)

    return guarded


@pytest.fixture(scope="session", autouse=True)
def no_network():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _only_loopback(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", _only_loopback(socket.socket.connect_ex))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_fork_server_for_all():
    """A process has one, and what it imports is said by the first pipeline that it serves: said by a pipeline of toy
    stages, every worker after it would import PyTorch anew."""
    start = Supervisor.__init__
    everything = ["opdctl.worker", *embedded.preload(embedded.KINDS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "__init__", lambda self, lock, preload=(): start(self, lock, everything))
        yield


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, made the current one: `runs/` and the MLflow store of a test end up in it."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
