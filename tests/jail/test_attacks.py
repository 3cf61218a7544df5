"""Every attack of `scripts/attacks` fails in the jail and costs nobody else a verdict; without one most succeed."""

from dataclasses import replace

import pytest

from opdctl.jail import Jail, isolation
from opdctl.tasks import verifiers
from scripts.attacks import attempt, attempt_bare, programs
from scripts.attacks.answers import ANSWERS

PROGRAMS = programs()


@pytest.fixture(scope="module")
def jail():
    if why := isolation():
        pytest.skip(f"this machine cannot contain programs: {why}")
    with Jail(1) as jail:
        yield jail


def named(attacks):
    return [pytest.param(attack, id=attack.name) for attack in attacks]


@pytest.mark.parametrize("attack", named(PROGRAMS))
def test_a_program_neither_scores_nor_escapes_nor_spoils_the_next(jail, attack):
    result = attempt(jail, attack, "cpython")
    assert (result.scored, result.escaped, result.others) == (False, False, True)


@pytest.mark.parametrize("attack", named(attack for attack in PROGRAMS if attack.kind != "flooding"))
def test_a_program_that_monty_may_run_first_does_not_either(jail, attack):
    result = attempt(jail, attack, "auto")
    assert (result.scored, result.escaped, result.others) == (False, False, True)


@pytest.mark.parametrize("attack", named(attack for attack in PROGRAMS if attack.bare in ("scores", "escapes")))
def test_without_a_jail_it_succeeds(attack):
    assert attempt_bare(attack) == attack.bare


@pytest.mark.parametrize("answer", named(answer for answer in ANSWERS if not answer.slow))
def test_an_answer_does_not_score(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(verifiers, "LIMITS", replace(verifiers.LIMITS, cpu_s=0.5))
    completion = answer.completion.replace("CANARY", str(tmp_path / "canary"))
    [verdict] = verifiers.resolve(answer.verifier)([(completion, answer.answer)])
    assert not verdict.correct
    assert not (tmp_path / "canary").exists()
