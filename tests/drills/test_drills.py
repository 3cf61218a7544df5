"""A sample of the failure drills, and that they can fail."""

import random
import shutil

import pytest

from drills import __main__ as every
from drills import survival
from drills.drill import carry_out_chain
from drills.faults import KINDS, SAMPLE, SEED, drills, of_row
from drills.rehearsal import rehearse
from drills.scene import scene

pytestmark = pytest.mark.xdist_group("drills")  # they share one undisturbed run


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return rehearse(tmp_path_factory.mktemp("drills"), ("toy",), tracked=False)


@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_a_run_struck_again_and_again_ends_as_if_nothing_had_happened(number, known, tmp_path):
    if known.shim is None:
        pytest.skip("no C compiler (cc) for the shim that makes calls fail")
    verdict = carry_out_chain([of_row(row) for row in SAMPLE[number]], known, tmp_path, SEED, number)
    assert not verdict.problems, "\n".join([*verdict.problems, verdict.story])
    assert verdict.struck, verdict.story


def test_a_changed_byte_is_seen(known, tmp_path):
    with scene(known, "toy", tmp_path / "w", random.Random(0), 0.0, False) as made:
        made.workspace.rmdir()
        shutil.copytree(known.folder / "undisturbed-toy", made.workspace, symlinks=True)
        assert survival.problems(made) == []
        [weights] = made.folder.glob("stages/opd/checkpoints/*/model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        found = survival.problems(made)
    assert any(line.startswith("stages/opd/checkpoint/model.safetensors") for line in found)
    assert any("its sha256 is another" in line for line in found)


def test_there_are_two_hundred_drills_and_the_seed_gives_them_again():
    assert len(drills()) == 200
    assert drills() == drills(SEED)
    assert drills() != drills(SEED + 1)
    assert {kind.row for kind in KINDS} == {drill.kind.row for drill in drills()}


@pytest.mark.drills
def test_all_drills_are_survived():
    assert every.main([]) == 0
