"""Is this machine fit to run recipes? Every question is asked of the thing itself, none of a configuration.

Libraries that may take the interpreter down with them (a PyTorch built for another processor or driver) are imported
in a child process.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opdctl.console.tables import Check
from opdctl.secrets import redact

NEEDED = ("torch", "transformers", "safetensors", "hydra-core", "pydantic", "typer", "rich", "mlflow", "numpy")
OPTIONAL = {
    "pyarrow": "reads parquet data",
    "math-verify": "the math_verify verifier",
    "gguf": "imports gguf:FILE",
    "lm-eval": "eval stages with harness: lm_eval",
    "pydantic-monty": "runs most programs of models without CPython",
}
GIB = 2**30
LOW_MEMORY_GIB = 2.0  # the laptop recipe with two workers
LOW_DISK_GIB = 1.0

_PROBE = """
import json, torch, transformers
count = torch.cuda.device_count()
devices = [[torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory] for i in range(count)]
torch.ones(8, 8) @ torch.ones(8, 8)
print(json.dumps({"devices": devices, "threads": torch.get_num_threads(), "cuda": torch.version.cuda}))
"""


def diagnose(workspace: Path, tracking_uri: str | None = None) -> list[Check]:
    """All checks of a workspace on this machine; `tracking_uri` is a server to try instead of the workspace's store."""
    return [
        *_packages(),
        *_compute(),
        *_memory(),
        _jail(),
        _writable(workspace),
        _disk(workspace),
        _server(tracking_uri) if tracking_uri else _store(workspace),
    ]


def _packages() -> Iterator[Check]:
    from opdctl import __version__

    python = platform.python_version()
    fit = sys.version_info >= (3, 11)
    yield Check("installed", "python", "ok" if fit else "broken", f"{python} {sys.executable}", "opdctl needs 3.11")
    yield Check("installed", "opdctl", "ok", __version__)
    for name in NEEDED:
        try:
            yield Check("installed", name, "ok", version(name))
        except PackageNotFoundError:
            yield Check("installed", name, "broken", "not installed", f"pip install {name}")
    for name, use in OPTIONAL.items():
        try:
            yield Check("installed", name, "ok", version(name))
        except PackageNotFoundError:
            yield Check("installed", name, "absent", f"not installed ({use})")


def _compute() -> Iterator[Check]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("machine", "cpus", "ok", f"{cpus} usable, {platform.processor() or platform.machine()}")
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"the interpreter died with exit code {done.returncode}"]
        remedy = "reinstall both: pip install --force-reinstall torch transformers"
        yield Check("machine", "torch", "broken", last[0], remedy)
        return
    found = json.loads(done.stdout.splitlines()[-1])
    threads = os.environ.get("OMP_NUM_THREADS", "")
    note = f" (OMP_NUM_THREADS={threads})" if threads else ""
    yield Check("machine", "threads", "ok", f"{found['threads']} by default{note}; each stage sets its own from `cpus`")
    gpus = [f"{at}: {name}, {memory / GIB:.0f} GiB" for at, (name, memory) in enumerate(found["devices"])]
    if gpus:
        yield Check("machine", "gpus", "ok", f"{'; '.join(gpus)}; CUDA {found['cuda']}")
    elif shutil.which("nvidia-smi"):
        remedy = "install a torch built for CUDA, or check the driver with nvidia-smi"
        yield Check("machine", "gpus", "absent", "torch sees none, though nvidia-smi is installed", remedy)
    else:
        yield Check("machine", "gpus", "absent", "none; stages run on the CPU")


def _memory() -> Iterator[Check]:
    """Linux only: elsewhere there is no number to be had without another package."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, free = (int(fields[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, int(text) / GIB), min(free, (int(text) - used) / GIB)
    low = free < LOW_MEMORY_GIB
    detail = f"{free:.1f} of {total:.1f} GiB free"
    yield Check("machine", "memory", "broken" if low else "ok", detail, "free memory, or run fewer stages at once")


def _jail() -> Check:
    from opdctl.jail import REMEDY, isolation

    if why := isolation():
        return Check("machine", "jail", "absent", f"tasks that run a model's code are refused: {why}", REMEDY)
    held = "user, process, network and mount namespaces, system call filter, limits"
    return Check("machine", "jail", "ok", f"contains a model's code: {held}")


def _writable(workspace: Path) -> Check:
    remedy = "choose another folder with --workspace, or make this one writable"
    try:
        with tempfile.NamedTemporaryFile(dir=workspace, prefix=".opdctl-doctor-"):
            return Check("workspace", "folder", "ok", f"{workspace}, writable")
    except OSError as error:
        return Check("workspace", "folder", "broken", f"{workspace}: {error.strerror}", remedy)


def _disk(workspace: Path) -> Check:
    try:
        usage = shutil.disk_usage(workspace)
    except OSError as error:
        return Check("workspace", "disk", "broken", str(error.strerror))
    low = usage.free < LOW_DISK_GIB * GIB
    detail = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    return Check("workspace", "disk", "broken" if low else "ok", detail, "free some space: checkpoints are kept")


def _store(workspace: Path) -> Check:
    from opdctl.store import Workspace

    database = Workspace(workspace).tracking_database
    if not database.exists():
        return Check("tracking", "mlflow", "ok", f"{database}, made by the first run")
    import sqlite3

    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5) as connection:
            runs = connection.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.Error as error:
        remedy = "move the file away: the next run makes a new one and replays what it tracks"
        return Check("tracking", "mlflow", "broken", f"{database}: {error}", remedy)
    return Check("tracking", "mlflow", "ok", f"{database}, {runs} runs")


def _server(uri: str) -> Check:
    remedy = "start the server, or mend the address; runs go on without it and catch up later"
    if not uri.startswith(("http://", "https://")):
        return Check("tracking", "mlflow", "broken", f"{redact(uri)} is not an http address", remedy)
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5) as answer:
            return Check("tracking", "mlflow", "ok", f"{redact(uri)} answers ({answer.status})")
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        return Check("tracking", "mlflow", "broken", redact(f"{uri}: {error}"), remedy)
