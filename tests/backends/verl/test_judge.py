"""Verdicts from another process are the task's own; a verifier that is lost costs its completion alone."""

import json
import logging
import textwrap
from pathlib import Path

import pytest
from engine import stages

from opdctl.backends.verl import judge
from opdctl.backends.verl.judge import Judge, pack
from opdctl.errors import StageFailed
from opdctl.settings import ChainTask, FileTask
from opdctl.tasks import load_task

OWN = """
    import os, time
    def verify(completion, answer):
        print("to stdout, which carries the verdicts")
        if completion == "hang":
            time.sleep(60)
        if completion == "die":
            os._exit(7)
        if completion == "leave":
            raise SystemExit(0)
        if completion == "fail":
            raise ValueError("cannot be read")
        return 0.25 if completion == "partly" else completion == answer
"""


@pytest.fixture
def own(tmp_path: Path):
    """A judge of rows with the user's own verifier, and a packed prompt."""
    (tmp_path / "own_verifier.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "who", "a": "w1"}) + "\n")
    settings = FileTask(
        path=str(tmp_path / "rows.jsonl"), prompt="q", answer="a", verifier="own_verifier:verify", held_out=0.0
    )
    [prompt] = load_task("own", settings, None, tmp_path).prompts("train", 0, 0, 1)
    (tmp_path / "rows.jsonl").unlink()  # verdicts need no rows
    judge = Judge({"own": settings.model_dump()}, None, str(tmp_path))
    yield lambda completion, **limit: judge.verify("own", pack(prompt), completion, **limit)
    judge.close()


def test_verdicts_are_the_tasks_own():
    settings = ChainTask.model_validate(stages.TASKS["math"])
    task = load_task("math", settings, None)
    judge = Judge({"math": stages.TASKS["math"]}, stages.EFFORTS, ".")
    for prompt in task.prompts("train", 0, 0, 8):
        for completion in (task.reference(prompt), "3 4", "1 2 3 4", "", "6 6"):
            verdict = task.verify(prompt, completion)
            given = judge.verify("math", pack(prompt), completion)
            assert (given.correct, given.reward) == (verdict.correct, verdict.reward)
    judge.close()


def test_builtin_verifiers_keep_their_time_limit(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "who", "a": "(a+)+b"}) + "\n")
    settings = FileTask(path=str(tmp_path / "rows.jsonl"), prompt="q", answer="a", verifier="regex", held_out=0.0)
    [prompt] = load_task("own", settings, None, tmp_path).prompts("train", 0, 0, 1)
    judge = Judge({"own": settings.model_dump()}, None, str(tmp_path))
    assert not judge.verify("own", pack(prompt), "a" * 40).correct
    assert judge.verify("own", pack(prompt), "aab").correct
    judge.close()


def test_what_a_verifier_prints_is_no_verdict(own):
    assert own("w1").correct
    assert own("partly").reward == 0.25


@pytest.mark.parametrize("completion", ["hang", "die"])
def test_a_lost_verifier_costs_its_own_completion_and_is_named(own, caplog, completion):
    with caplog.at_level(logging.ERROR):
        verdict = own(completion, limit_s=2.0)
    assert not verdict.correct
    assert verdict.reward == 0.0
    told = {"hang": "took more than 2 s", "die": r"ended its process (7)"}[completion]
    assert f"task own: the verifier {told}" in caplog.text
    assert '"text": "who"' in caplog.text
    assert own("w1").correct


def test_a_verifier_that_is_lost_again_and_again_fails_the_stage(own):
    for _ in range(judge.LOSSES - 1):
        own("die")
    with pytest.raises(StageFailed, match="task own: the verifier ended its process"):
        own("die")


def test_losses_between_verdicts_do_not_add_up(own):
    for _ in range(judge.LOSSES + 1):
        assert not own("die").correct
        assert own("w1").correct


@pytest.mark.parametrize(("completion", "error"), [("fail", "ValueError: cannot be read"), ("leave", "SystemExit: 0")])
def test_a_verifier_that_fails_is_the_engines_failure(own, completion, error):
    with pytest.raises(StageFailed, match=f"task own: verifier own_verifier:verify failed on row 1.*{error}"):
        own(completion)
    assert own("w1").correct
