"""Verdicts on verl's rows are the task's own, from any thread; a verifier that is lost costs its completion alone."""

import json
import logging
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from engine import stages

from opdctl.backends.verl.judge import Judge, pack
from opdctl.errors import StageFailed
from opdctl.settings import ChainTask, FileTask
from opdctl.tasks import load_task, verifiers

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
def own(tmp_path: Path, monkeypatch):
    """A judge of rows with the user's own verifier, and a packed prompt."""
    (tmp_path / "own_verifier.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "who", "a": "w1"}) + "\n")
    settings = FileTask(
        path=str(tmp_path / "rows.jsonl"), prompt="q", answer="a", verifier="own_verifier:verify", held_out=0.0
    )
    [prompt] = load_task("own", settings, None, tmp_path).prompts("train", 0, 0, 1)
    (tmp_path / "rows.jsonl").unlink()  # verdicts need no rows
    judge = Judge({"own": settings.model_dump()}, None, str(tmp_path))
    monkeypatch.setattr(verifiers, "OWN_LIMITS", replace(verifiers.OWN_LIMITS, wall_s=2.5))
    return lambda completion: judge.verify("own", pack(prompt), completion)


def test_verdicts_are_the_tasks_own():
    settings = ChainTask.model_validate(stages.TASKS["math"])
    task = load_task("math", settings, None)
    judge = Judge({"math": stages.TASKS["math"]}, stages.EFFORTS, ".")
    for prompt in task.prompts("train", 0, 0, 8):
        for completion in (task.reference(prompt), "3 4", "1 2 3 4", "", "6 6"):
            verdict = task.verify(prompt, completion)
            given = judge.verify("math", pack(prompt), completion)
            assert (given.correct, given.reward) == (verdict.correct, verdict.reward)


def test_builtin_verifiers_keep_their_time_limit_in_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(verifiers, "LIMITS", replace(verifiers.LIMITS, cpu_s=0.3))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "who", "a": "(a+)+b"}) + "\n")
    settings = FileTask(path=str(tmp_path / "rows.jsonl"), prompt="q", answer="a", verifier="regex", held_out=0.0)
    [prompt] = load_task("own", settings, None, tmp_path).prompts("train", 0, 0, 1)
    judge = Judge({"own": settings.model_dump()}, None, str(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda text: judge.verify("own", pack(prompt), text), ["a" * 40, "aab"]))
    assert [verdict.correct for verdict in verdicts] == [False, True]


def test_what_a_verifier_prints_is_no_verdict(own):
    assert own("w1").correct
    assert own("partly").reward == 0.25


@pytest.mark.parametrize("completion", ["hang", "die"])
def test_a_lost_verifier_costs_its_own_completion_and_is_named(own, caplog, completion):
    with caplog.at_level(logging.ERROR):
        verdict = own(completion)
    assert not verdict.correct
    assert verdict.reward == 0.0
    told = {"hang": "took more than 2.5 s", "die": r"ended its process (7)"}[completion]
    assert f"verifier own_verifier:verify {told}" in caplog.text
    assert own("w1").correct


def test_a_verifier_that_is_lost_and_never_gave_a_verdict_fails_the_stage(own):
    for _ in range(verifiers.LOSSES - 1):
        own("die")
    with pytest.raises(StageFailed, match="own_verifier:verify failed on row 1.*ended its process .7., 3 times"):
        own("die")


def test_a_verifier_that_has_given_a_verdict_may_be_lost_as_often_as_completions_ask_for_it(own):
    assert own("w1").correct
    for _ in range(verifiers.LOSSES + 1):
        assert not own("die").correct


@pytest.mark.parametrize(("completion", "error"), [("fail", "ValueError: cannot be read"), ("leave", "SystemExit: 0")])
def test_a_verifier_that_fails_is_the_engines_failure(own, completion, error):
    with pytest.raises(StageFailed, match=f"task own: verifier own_verifier:verify failed on row 1.*{error}"):
        own(completion)
    assert own("w1").correct
