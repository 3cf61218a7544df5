"""The processes of a worker, as the host starts, asks and ends them."""

import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from opdctl.errors import StageFailed
from opdctl.jail.inside import receive, send

START_S = 60.0  # wall time that a server gets to start
GRACE_S = 5.0  # and to notice an order

Mode = Literal["functions", "jailed", "programs"]

_PACKAGE = Path(__file__).resolve().parents[1]
# opdctl from where it stands, without the folder around it: an environment of its own (verl's) has other libraries
_START = f"""
import importlib.util, sys
home = {str(_PACKAGE)!r}
found = importlib.util.spec_from_file_location("opdctl", home + "/__init__.py", submodule_search_locations=[home])
module = sys.modules["opdctl"] = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
from opdctl.jail import monty
from opdctl.jail.inside import main
main()
"""
# one thread each: there is a worker for every core
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Lost(Exception):
    """The server has ended."""


class Server:
    """One keeper and what is below it. Ends with this process, however that ends."""

    def __init__(self, mode: Mode, greeting: Mapping[str, Any], temp: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        options = ["-I", "-B", *(["-S"] if mode == "programs" else [])]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *options, "-c", _START, mode, *([temp] if temp else [])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self.control = ours
        try:
            send(ours, greeting)
            answer = self.receive(START_S)
        except (Lost, TimeoutError, OSError) as error:
            self.close()
            raise StageFailed(f"a worker of the jail did not start: {error}") from error
        if "ready" not in answer:
            self.close()
            raise Refused(f"a worker of the jail did not start: {answer['refused']}")

    def receive(self, timeout_s: float) -> Any:
        """Raises TimeoutError, or Lost where the server has ended."""
        if not select.select([self.control], [], [], max(0.0, timeout_s))[0]:
            raise TimeoutError(f"no answer in {timeout_s:g} s")
        self.control.settimeout(max(timeout_s, GRACE_S))
        try:
            return receive(self.control)
        except (EOFError, ConnectionError) as error:
            raise Lost(str(error)) from error

    def close(self) -> int:
        """Kill all of it; the number of the signal that had ended it already, or its exit code."""
        self.control.close()
        try:
            return int(self.process.wait(GRACE_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return int(self.process.wait())


class Refused(StageFailed):
    """The kernel does not allow this isolation."""
