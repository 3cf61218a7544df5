"""A TCP proxy in front of a server that fails as networks and servers do, and a real MLflow server to put behind it."""

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close that the other side sees as a reset


class Proxy:
    """`mode`: pass; down (connections are reset); silent (nothing is answered); a number (an HTTP state for every
    request). `delay_s`: before each piece of an answer. `cut`: numbers of the answers, counted from 0 by `answers`,
    that end in the middle. Nothing of a request is held back: what it asks for is done."""

    def __init__(self, port: int) -> None:
        self.mode, self.delay_s, self.cut = "pass", 0.0, set()
        self.answers = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def heal(self) -> None:
        self.mode, self.delay_s, self.cut = "pass", 0.0, set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Request by request; each is read whole, so that answers can be counted."""
        with client, suppress(OSError), client.makefile("rb") as stream:
            while (request := _message(stream)) is not None:
                if self.mode == "down":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
                if self.mode == "silent":
                    while self.mode == "silent":
                        time.sleep(0.05)
                    return
                if self.mode != "pass":
                    client.sendall(f"HTTP/1.1 {self.mode} no\r\nContent-Length: 5\r\n\r\nsorry".encode())
                    continue
                answer = self._forward(request)
                number, self.answers = self.answers, self.answers + 1
                time.sleep(self.delay_s)
                if number in self.cut:
                    client.sendall(answer[: len(answer) // 2])
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
                client.sendall(answer)

    def _forward(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self._port)) as server, server.makefile("rb") as stream:
            server.sendall(request)
            return _message(stream) or b""


def _message(stream) -> bytes | None:
    """A request or an answer, with its body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (line := stream.readline()):
            return None
        head += line
    if length := re.search(rb"(?i)\r\ncontent-length: *(\d+)", head):
        return head + stream.read(int(length[1]))
    if not re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        return head
    body = b""
    while not body.endswith(b"\r\n0\r\n\r\n") and body != b"0\r\n\r\n":
        if not (line := stream.readline()):
            return None
        body += line
        if size := int(line.split(b";")[0], 16):
            body += stream.read(size + 2)
        else:
            body += stream.readline()
    return head + body


@contextmanager
def mlflow_server(folder: Path, database: Path):
    """Its port. `database` is a SQLite file that is set up."""
    shutil.copy(database, folder / "server.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}", "--artifacts-destination", str(folder)]
    with (folder / "server.log").open("w") as log:
        alone = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # else it starts eight more processes
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=alone)
    try:
        deadline = time.monotonic() + 300
        while not _listens(port):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()  # noqa: PT018
            time.sleep(0.1)
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
