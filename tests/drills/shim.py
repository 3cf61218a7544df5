"""Faults of the system calls and of the clock, by `shim.c`."""

import errno
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from drills.scene import Scene

SHORT = -1  # in the place of an error: half of the bytes are written
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS, "short": SHORT}


def compiled(folder: Path) -> Path | None:
    """The library; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def failing_call(
    scene: Scene, role: str, calls: str, number: int, error: str, *, only: str = "", sticky: bool = False
) -> Mapping[str, str]:
    """The environment in which the `number`-th of `calls` fails, on a file whose path holds `only`, in the processes
    of the role; with `sticky` all that come after it as well."""
    return _base(scene, role) | {
        "DRILL_CALLS": calls,
        "DRILL_NTH": str(number),
        "DRILL_ERRNO": str(ERRORS[error]),
        "DRILL_ONLY": only,
        "DRILL_STICKY": str(int(sticky)),
    }


def jumping_clock(scene: Scene, role: str, seconds: int, after_s: float) -> Mapping[str, str]:
    """The wall clock is `seconds` off from `after_s` after the start of each process of the role (`all`: of any)."""
    return _base(scene, role) | {"DRILL_CLOCK_BY": str(seconds), "DRILL_CLOCK_AFTER": f"{after_s:.3f}"}


def struck(scene: Scene) -> str:
    """What the shim did, a line each; empty: nothing."""
    mark = _mark(scene)
    return mark.read_text() if mark.exists() else ""


def _base(scene: Scene, role: str) -> dict[str, str]:
    assert scene.known.shim is not None
    _mark(scene).unlink(missing_ok=True)
    return {
        "LD_PRELOAD": str(scene.known.shim),
        "DRILL_ROLE": role,
        "DRILL_ROOT": f"{scene.workspace}/",
        "DRILL_MARK": str(_mark(scene)),
    }


def _mark(scene: Scene) -> Path:
    return scene.workspace.with_name(f"{scene.workspace.name}.struck")
