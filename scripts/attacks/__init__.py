"""Attacks on verifiers: programs and answers that look right without being right, leave the jail, or hold it up.

`python -m scripts.attacks` tries them all and prints the table of `docs/jail.md`; `tests/jail/test_attacks.py` tries
each as a test, and shows that those marked so succeed against an executor without a jail.

A program is asked for `f()`, which should return a secret that is drawn anew for every attack. The secret lies where
careless executors leave it: in the environment and the memory of the process that judges, and in a file. The programs
lie in the text files here, each under a line `#### name | what it does to an executor without a jail`:

    scores    passes for right        escapes   leaves or reaches what it should not
    hangs     takes more than 2 s     fails     nothing of these
    harmful   not tried there, for the machine's sake
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from opdctl.jail import Jail, Limits, Program

LIMITS = Limits(cpu_s=1.0, wall_s=1.2, memory_mib=512)
BARE_S = 2.0  # wall time that the executor without a jail gets
KINDS = ("looking_right", "leaving", "flooding")

Interpreter = Literal["auto", "cpython", "monty"]


@dataclass(frozen=True)
class Attack:
    """`source` may name SECRET_FILE, CANARY (a path that must not come to be), PORT (of a server that must not be
    reached), ABSTRACT (the name of a socket, the same) and PARENT (the process that judges)."""

    kind: str
    name: str
    bare: str
    source: str
    limits: Limits


def programs() -> list[Attack]:
    """All attacks by programs."""
    found = []
    for kind in KINDS:
        for block in (Path(__file__).parent / f"{kind}.txt").read_text().split("#### ")[1:]:
            head, _, source = block.partition("\n")
            name, bare, *more = head.split(" | ")
            processes = int(more[0].removeprefix("processes=")) if more else 1
            found.append(Attack(kind, name, bare, source, replace(LIMITS, processes=processes)))
    return found


@dataclass(frozen=True)
class World:
    """What surrounds an attack, and what it must not reach."""

    secret: int
    folder: Path
    port: int
    unix: str
    reached: threading.Event

    def source(self, attack: Attack) -> str:
        names = {"SECRET_FILE": self.folder / "secret", "CANARY": self.canary, "PORT": self.port, "ABSTRACT": self.unix}
        text = attack.source.replace("NULLBYTE", "\0").replace("SURROGATE", "\ud800")
        for name, value in (names | {"PARENT": os.getpid()}).items():
            text = text.replace(name, str(value))
        return text

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    def escaped(self) -> bool:
        return self.canary.exists() or self.reached.is_set()


@contextmanager
def world() -> Iterator[World]:
    secret, unix = secrets.randbelow(10**15) + 10**15, f"opdctl-{secrets.token_hex(8)}"
    reached = threading.Event()
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    servers[1].bind(f"\0{unix}")
    servers[1].listen()
    threads = [threading.Thread(target=_serve, args=[server, reached]) for server in servers]
    for thread in threads:
        thread.start()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "secret").write_text(str(secret))
        os.environ["OPDCTL_SECRET"] = str(secret)
        try:
            yield World(secret, Path(folder), servers[0].getsockname()[1], unix, reached)
        finally:
            del os.environ["OPDCTL_SECRET"]
            for server in servers:
                server.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for server in servers:
                server.close()


def _serve(server: socket.socket, reached: threading.Event) -> None:
    try:
        server.accept()[0].close()
    except OSError:
        return  # shut down
    reached.set()


@dataclass(frozen=True)
class Result:
    scored: bool
    escaped: bool
    ended: str  # how
    others: bool  # was an honest program judged right by the same worker afterwards?


def attempt(jail: Jail, attack: Attack, interpreter: Interpreter) -> Result:
    with world() as around:
        program = Program(around.source(attack), ["f()"], limits=attack.limits, interpreter=interpreter)
        [outcome] = jail.run([program])
        honest = Program(f"def f(): return {around.secret}", ["f()"], interpreter=interpreter)
        [after] = jail.run([honest])
        scored = not outcome.failure and bool(outcome.value == [around.secret])
        time.sleep(0.5 if "daemon" in attack.name else 0)
        escaped = around.escaped() or "ESCAPED" in outcome.printed
        return Result(scored, escaped, outcome.failure or "a wrong value", after.value == [around.secret])


def attempt_bare(attack: Attack) -> str:
    """The same without a jail, as often done: the tests behind the program, in one process; exit code 0 passes."""
    with world() as around:
        script = around.folder / "program.py"
        check = f"\ndef check(g):\n    expected = {around.secret}\n    assert g() == expected\ncheck(f)\n"
        script.write_text(around.source(attack) + check, errors="surrogatepass")
        with subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=around.folder,
        ) as process:
            try:
                code = process.wait(BARE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return "hangs"
        time.sleep(0.6 if "daemon" in attack.name else 0)
        return "escapes" if around.escaped() else "fails" if code else "scores"
