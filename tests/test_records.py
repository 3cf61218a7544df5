"""Records as other programs, disks and hands may have left them; and writing that fails."""

import json
import resource
import shutil
from dataclasses import asdict

import pytest
from checkpoints import record

from opdctl.errors import OpdctlError
from opdctl.records import RECORD, disk_errors, parse_record

LISTED = {"sha256": "0", "size": 7, "mtime_ns": 0}
PARENT = {"role": "init", "label": "base", "ref": "model:", "record_id": None}
OTHER_TYPES = [
    *((name, None) for name in ("id", "run", "stage", "kind", "fingerprint", "created", "opdctl_version", "code")),
    *(("id", value) for value in (1, "", "..", "a/b", "**")),
    *(("step", value) for value in ("5", 1.5, None, 10**400)),
    *(("identity", value) for value in (None, [], "x")),
    *(("parents", value) for value in (None, {}, "", [None], [[]])),
    *(("parents", [PARENT | {"record_id": value}]) for value in (1, [], {}, "../x")),
    *(("parents", [PARENT | {name: value}]) for name in ("role", "label", "ref") for value in (None, 1, [1], "a\0b")),
    *(("metrics", value) for value in (None, [], *({"loss": wrong} for wrong in (None, "0.5", {}, 10**400)))),
    *(("labels", value) for value in (None, [], {"loss": 1})),
    *(("argv", value) for value in (None, "run", [1])),
    *(("seconds", value) for value in (None, "1", float("nan"))),
    ("mlflow_run_id", 1),
    *(("files", value) for value in (None, [], {"a": None}, {"a": {}})),
    *(("files", {"a": LISTED | wrong}) for wrong in ({"size": "7"}, {"size": -1}, {"sha256": None}, {"mtime_ns": ""})),
    *(("files", {name: LISTED}) for name in ("", "/etc/hosts", "../x", "a/../../x", "a\0b", "\ud800")),
    *(("accepted", value) for value in (None, "x", [1])),
]


@pytest.mark.parametrize(("name", "value"), OTHER_TYPES)
def test_a_record_with_a_field_of_another_type_is_a_damaged_one(tmp_path, name, value):
    (tmp_path / RECORD).write_text(json.dumps(asdict(record()) | {name: value}))
    assert f"record unreadable: {tmp_path / RECORD}: {name} is not " in str(parse_record(tmp_path))


@pytest.mark.parametrize("name", ["id", "parents", "files", "more"])
def test_a_record_that_lacks_a_field_or_has_one_more_is_a_damaged_one(tmp_path, name):
    whole = asdict(record())
    (tmp_path / RECORD).write_text(json.dumps({key: whole[key] for key in whole if key != name} | {"more": 1}))
    assert "record unreadable: " in str(parse_record(tmp_path))


def test_a_record_may_hold_whatever_a_run_may_measure(tmp_path):
    made = record(parents=["p"], metrics={"loss": float("nan"), "reward": float("-inf"), "models": 2}, argv=["\udc80"])
    (tmp_path / RECORD).write_text(json.dumps(asdict(made)))
    assert str(parse_record(tmp_path)) == str(made)


def test_of_a_copy_that_fails_the_target_is_named(tmp_path):
    (tmp_path / "from").write_bytes(b"x" * 10_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OpdctlError, match=f"cannot write {tmp_path / 'to'}: File too large"), disk_errors(tmp_path):
            shutil.copyfile(tmp_path / "from", tmp_path / "to")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
