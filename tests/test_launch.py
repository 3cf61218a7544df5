"""Models from outside, on their way to a worker."""

from pathlib import Path

import pytest
import toy
from gguf_files import tiny_llama, write_gguf

from opdctl import fetch
from opdctl.engine import gguf_import
from opdctl.errors import StageRefused
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.store import Workspace


@pytest.fixture
def planned(workspace):
    """A plan of one stage with that model."""

    def make(ref):
        pipeline = toy.pipeline({"sft": toy.sft(ref)}, folder=workspace)
        return make_plan(pipeline, Workspace(workspace).run("r"))

    return make


def launched(plan, *, get=True):
    told = []
    launcher = Launcher(plan, plan.stages, told.append, fetch=get)
    return launcher.spec(plan.stages[0], [], None).inputs[0], told


@pytest.fixture
def import_here(monkeypatch):
    """Not in a process of its own, which takes seconds to start."""

    def imported(file, folder, report, *, bar):
        report(f"importing {file}")
        gguf_import.import_gguf(file, folder)

    monkeypatch.setattr("opdctl.fetch.import_gguf", imported)


@pytest.mark.usefixtures("import_here")
def test_a_gguf_file_is_imported_once_and_counts_by_its_content(planned, workspace):
    write_gguf(workspace / "a.gguf", tiny_llama())
    plan = planned("gguf:a.gguf")
    digest = plan.stages[0].identity["inputs"]["init"][0]["model"]["gguf"]
    before, told = launched(plan, get=False)
    assert (told, (workspace / "models").exists()) == ([], False)
    given, told = launched(plan)
    assert given.path == before.path == str(fetch.gguf_folder(workspace, digest).resolve())
    assert (given.source, len(told)) == ("gguf:a.gguf", 1)
    (workspace / "a.gguf").rename(workspace / "b.gguf")
    renamed = planned("gguf:b.gguf")
    assert renamed.stages[0].fingerprint == plan.stages[0].fingerprint
    assert launched(renamed)[1] == []


@pytest.mark.usefixtures("import_here")
def test_an_imported_model_that_was_changed_is_refused(planned, workspace):
    write_gguf(workspace / "a.gguf", tiny_llama())
    plan = planned("gguf:a.gguf")
    folder = Path(launched(plan)[0].path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(StageRefused, match=r"config\.json is missing or has changed") as refused:
        launched(plan)
    assert str(folder) in refused.value.hint
