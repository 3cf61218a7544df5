"""What every drill is compared with: the undisturbed runs."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drills.scene import Lost, Rehearsal, Undisturbed, scene
from drills.shim import compiled
from drills.survival import digests, points


def rehearse(folder: Path, subjects: Sequence[str] = ("toy", "engine"), *, tracked: bool = True) -> Rehearsal:
    """Run each subject undisturbed, and compile the shim. Without `tracked` for drills that are not tracked only."""
    database = _empty_database(folder / "store") if tracked else folder / "none"
    bare = Rehearsal(folder, {}, database, compiled(folder))
    known: dict[str, Undisturbed] = {}
    for name in subjects:
        with scene(bare, name, folder / f"undisturbed-{name}", random.Random(0), 0.0, tracked) as made:
            running = made.start()
            if running.wait() != 0:
                raise Lost(f"undisturbed, {name} fails: {running.told()}")
            seconds = time.monotonic() - running.began
            made.tell_mlflow(running.told())
            known[name] = Undisturbed(seconds, made.events(), digests(made), points(made)[0] if tracked else {})
    return Rehearsal(folder, known, database, bare.shim)


def _empty_database(folder: Path) -> Path:
    folder.mkdir(parents=True)
    code = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments(max_results=1)"
    file = folder / "mlflow.db"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, f"sqlite:///{file}"], check=True, cwd=folder)
    return file
