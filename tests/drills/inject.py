"""How each kind of fault is brought about: a run is started, disturbed, and over when the function returns."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import create_server

from drills import shim
from drills.family import send
from drills.scene import Lost, Missed, Running, Scene

DEPTH = {"orchestrator": 160, "worker": 40}  # calls on files that a process of the toy makes, about


class Unavailable(Exception):
    """The fault cannot be brought about on this machine, and why."""


# ------------------------------------------------------------------------------------------------ signals


def signalled(scene: Scene, role: str, name: str, times: int = 1) -> None:
    """A signal to a process of the role; `both`: orchestrator and all workers; `all`: every process at once."""
    running = scene.start()
    running.until(scene.at)
    _strike(scene, running, role, getattr(signal, name), times)
    running.wait()
    if scene.draw.random() < 0.5:  # else the next run finds what is left of this one
        scene.family.left(60.0)


def again_and_again(scene: Scene, times: int) -> None:
    """Runs killed one after the other, each at a place and in a role of its own."""
    struck = 0
    for _ in range(times):
        running = scene.start()
        try:
            running.until(scene.draw.random() * 0.8)
            role = scene.draw.choice(("orchestrator", "worker", "fork server", "both", "all"))
            _strike(scene, running, role, signal.SIGKILL)
            struck += 1
        except Missed:
            pass
        running.wait()
    if not struck:
        raise Missed("every run was over")


def stopped(scene: Scene, role: str, then: str) -> None:
    """SIGSTOP; a while later SIGCONT (`continue`) or SIGKILL (`kill`); `left`: the orchestrator dies, and it stays."""
    running = scene.start()
    running.until(scene.at)
    [pid] = _strike(scene, running, role, signal.SIGSTOP)
    time.sleep(scene.draw.uniform(0.2, 2.0))
    if then == "left":
        running.process.kill()
    else:
        send(pid, signal.SIGCONT if then == "continue" else signal.SIGKILL)
    running.wait()


def storm(scene: Scene, times: int) -> None:
    """Every worker is killed soon after it has started, until the retries are used up or `times` have died."""
    running = scene.start()
    seen: set[int] = set()
    while not running.over() and len(seen) < times:
        for pid in scene.family.of("worker"):
            if pid not in seen:
                seen.add(pid)
                time.sleep(scene.draw.uniform(0, 0.2))
                send(pid, signal.SIGKILL)
        time.sleep(0.01)
    running.wait()
    scene.notes.append(f"{len(seen)} workers killed")
    if not seen:
        raise Missed("no worker was seen")


def _strike(scene: Scene, running: Running, role: str, number: int, times: int = 1) -> list[int]:
    """Signal the processes of a role; those that were hit. Raises Missed where there are none."""
    if role in ("both", "all"):
        members = scene.family.alive()
        pids = [pid for pid, found in members.items() if role == "all" or found in ("orchestrator", "worker")]
    elif role == "orchestrator":
        pids = [running.process.pid]
    else:
        pids = [scene.draw.choice(running.victims(role))]
    if running.over():
        raise Missed("the run was over")
    hit = []
    for _ in range(times):
        hit = [pid for pid in pids if send(pid, number)]
        time.sleep(0.1 if times > 1 else 0)
    if not hit:
        raise Missed("the process had ended")
    scene.notes.append(f"{signal.Signals(number).name} to {role} after {time.monotonic() - running.began:.2f} s")
    return hit


# ------------------------------------------------------------------------------------- calls that fail, clocks


def failing(scene: Scene, role: str, calls: str, error: str, sticky: bool = False, only: str = "") -> None:
    """The n-th of some calls on files of the workspace fails in a process of the role."""
    _need_shim(scene)
    number = 1 + int(scene.at**2 * DEPTH[role])
    faults = shim.failing_call(scene, role, calls, number, error, only=only, sticky=sticky)
    code = scene.start(faults=faults).wait()
    struck = shim.struck(scene)
    scene.notes.append(f"{error} at call {number} of {calls} in the {role}: {struck.strip()}; exit code {code}")
    if not struck:
        raise Missed(f"there was no call {number}")


def clock_jumps(scene: Scene, role: str, seconds: int, killed: bool = False) -> None:
    """The wall clock jumps in the processes of a role; `killed`: and after a while all of them die."""
    _need_shim(scene)
    after = scene.at * scene.undisturbed.seconds * 0.7 if role == "orchestrator" else scene.at * 0.3
    running = scene.start(faults=shim.jumping_clock(scene, role, seconds, after))
    if killed:
        running.until(min(0.95, scene.at + 0.2))
        _strike(scene, running, "all", signal.SIGKILL)
    code = running.wait()
    scene.notes.append(f"the clock jumped by {seconds} s: {shim.struck(scene).split()}; exit code {code}")
    if not shim.struck(scene):
        raise Missed("nobody looked at the clock")


def _need_shim(scene: Scene) -> None:
    if scene.known.shim is None:
        raise Unavailable("no C compiler (cc) for the shim that makes calls fail")


# ------------------------------------------------------------------------------------------------ disks


def small_disk(scene: Scene) -> None:
    """A file system of its own that is full from a moment on, and has room again for the next run."""
    with _mounted(scene.workspace):
        running = scene.start()
        running.until(scene.at)
        ballast = scene.workspace / "ballast"
        left = scene.draw.choice((0, 0, 4096, 30_000))
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(65536))
        os.truncate(ballast, max(0, ballast.stat().st_size - left))
        if running.over():
            raise Missed("the run was over")
        scene.notes.append(f"the disk was filled up to {left} bytes; exit code {running.wait()}")
        ballast.unlink()
        _finish_there(scene)


def read_only_disk(scene: Scene) -> None:
    """A file system that is mounted read-only between two runs, the first of which was killed."""
    with _mounted(scene.workspace):
        running = scene.start()
        running.until(scene.at)
        _strike(scene, running, "all", signal.SIGKILL)
        running.wait()
        scene.family.left(60.0)
        _mount("-o", "remount,ro", str(scene.workspace))
        code = scene.start().wait()
        _mount("-o", "remount,rw", str(scene.workspace))
        if code not in (1, 2):
            raise Lost(f"on a read-only file system the run ends with exit code {code}")
        _finish_there(scene)


def _finish_there(scene: Scene) -> None:
    """The rest of the drill, before the file system goes."""
    from drills.drill import judge

    judge(scene)


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    if os.geteuid() != 0 or not _mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)):
        raise Unavailable("only root may mount a small file system")
    try:
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


# --------------------------------------------------------------------------------------- files between two runs


def damaged(scene: Scene, pattern: str, how: str, finished: bool = False) -> None:
    """A run is killed, or `finished`; then a file of it is cut to half, emptied or deleted."""
    running = scene.start()
    if not finished:
        running.until(scene.at)
        _strike(scene, running, "all", signal.SIGKILL)
    running.wait()
    scene.family.left(60.0)
    files = [path for path in sorted(scene.workspace.glob(pattern)) if path.stat().st_size > 1]
    if not files:
        raise Missed(f"there is no {pattern}", early=True)
    path = scene.draw.choice(files)
    before = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, 0 if how == "empty" else len(before) // 2)
    scene.notes.append(f"{path.relative_to(scene.workspace)} was {how}, of {len(before)} bytes")
    _forgive(scene, path, before)


def _forgive(scene: Scene, path: Path, before: bytes) -> None:
    """What was nowhere but in the damaged file is not expected to come back."""
    import json

    if path.name == "events.jsonl":
        stage = _stage_of(scene, path)
        kept = path.read_bytes().count(b"\n") if path.exists() else 0
        scene.lost_events |= {(stage, json.loads(line)["step"]) for line in before.splitlines()[kept:]}
    if "checkpoints" in path.parts:  # the stage is trained again, and all that reads it
        scene.destroyed.add(path.parent.name)
        scene.repeated |= {"sft", "rl[domain=math]", "rl[domain=code]", "opd", "eval"}


def _stage_of(scene: Scene, path: Path) -> str:
    parts = path.relative_to(scene.folder).parts
    return f"{parts[1]}[{parts[2]}]" if "=" in parts[2] else parts[1]


# --------------------------------------------------------------------------------------------- tracking


def server_refuses(scene: Scene, how: str) -> None:
    """MLflow's server: nobody listens (`closed`), it answers 503 (`unavailable`), or never (`silent`)."""
    with _server(how) as port:
        running = scene.start(f"tracking.uri=http://127.0.0.1:{port}")
        code, told = running.wait(), running.told()
    scene.notes.append(f"the server was {how}; exit code {code}")
    if code != 0:
        raise Lost(f"an MLflow server that is {how} stopped the run: {told[-1500:]}")


def database_locked(scene: Scene, seconds: float | None) -> None:
    """Another program holds MLflow's database; `None`: to the end of the run."""
    with sqlite3.connect(scene.workspace / "mlflow.db", isolation_level=None, timeout=60) as database:
        running = scene.start()
        if seconds is not None:
            running.until(scene.at)
        database.execute("begin exclusive")
        if seconds is None:
            code = running.wait()
        else:
            time.sleep(seconds)
            if running.over():
                raise Missed("the run was over")
            database.execute("rollback")
            code = running.wait()
    database.close()
    if code != 0:
        raise Lost(f"a locked database stopped the run: {running.told()[-1500:]}")


@contextlib.contextmanager
def _server(how: str) -> Iterator[int]:
    if how == "unavailable":
        with HTTPServer(("127.0.0.1", 0), _Unavailable) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.server_port
            server.shutdown()
        return
    with create_server(("127.0.0.1", 0)) as socket:
        port = socket.getsockname()[1]
        if how == "closed":
            socket.close()
        yield port


class _Unavailable(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(503)

    do_POST = do_GET

    def log_message(self, *said: object) -> None:
        return None


# ------------------------------------------------------------------------------------------------ two at once


def two_at_once(scene: Scene, killed: bool) -> None:
    """A second orchestrator in the same run is told so and changes nothing; `killed`: the first dies meanwhile."""
    first = scene.start()
    first.until(scene.at)
    second = scene.start()
    if killed:
        time.sleep(scene.draw.uniform(0, scene.undisturbed.seconds / 2))
        first.process.kill()
    codes = second.wait(), first.wait()
    busy = "in use by process" in second.told() or "is in use" in second.told()
    scene.notes.append(f"exit codes {codes}, the second {'was refused' if busy else 'ran'}")
    if codes[0] != 0 and not busy:
        raise Lost(f"the second orchestrator ended with exit code {codes[0]}: {second.told()[-1500:]}")
    if not killed and codes[1] != 0:
        raise Lost(f"the first orchestrator was disturbed, exit code {codes[1]}: {first.told()[-1500:]}")


def drawn(seed: int, number: int, attempt: int = 0) -> random.Random:
    """What a drill draws from: its own numbers, whatever others drew."""
    return random.Random(f"{seed}/{number}/{attempt}")
