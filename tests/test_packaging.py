"""What pip gets: the wheel holds the package with its pipelines, and the pinned versions are ones it accepts."""

import configparser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(kind: str, root: Path, folder: Path) -> Path:
    """In a process of its own: hatchling reads the current folder."""
    code = "import sys, hatchling.build as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", code, kind, str(folder)], cwd=root, capture_output=True, text=True, check=True
    )
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def files(folder: str, pattern: str) -> set[str]:
    return {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob(pattern)}


def test_wheel_holds_every_module_and_every_pipeline_and_group(wheel):
    expected = files("opdctl", "*.py") | files("opdctl", "METADATA") | {"opdctl/py.typed"}
    expected |= {f"opdctl/builtin/{name}" for name in files("conf", "*.yaml") | files("pipelines", "*.yaml")}

    assert expected <= set(wheel.namelist())


def test_wheel_holds_nothing_but_the_package(wheel):
    assert {name.split("/")[0] for name in wheel.namelist()} == {"opdctl", f"opdctl-{PROJECT['version']}.dist-info"}


def test_wheel_installs_the_command_with_its_licence(wheel):
    info = f"opdctl-{PROJECT['version']}.dist-info"
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"{info}/entry_points.txt").decode())

    assert dict(scripts["console_scripts"]) == {"opdctl": "opdctl.cli:main"}
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


def test_packaged_pipeline_is_valid_from_any_folder(wheel, tmp_path):
    wheel.extractall(tmp_path / "installed")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}

    done = subprocess.run(
        [sys.executable, "-m", "opdctl", "validate", "kimi_k3", "scale=smoke"],
        cwd=elsewhere, env=environment, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert list(elsewhere.iterdir()) == []


def test_wheel_made_from_the_source_archive_is_the_same(wheel, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"opdctl-{PROJECT['version']}"

    with zipfile.ZipFile(build("wheel", source, tmp_path / "again")) as again:
        assert sorted(again.namelist()) == sorted(wheel.namelist())


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_direct_dependency_is_pinned_within_its_range():
    declared = [Requirement(r) for r in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
    pinned = pins()

    assert [str(r) for r in declared if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0"))] == []


def test_constraints_are_exact_versions_that_name_no_build_and_no_place():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
