"""Faults of a configuration and of saves are told by their key, or by what is wrong; without them nothing is."""

import pytest
import toy
from guards.outcomes import of_config, of_save
from guards.plan_faults import CONFIG, SAVES, ConfigFault, failure

pytestmark = pytest.mark.xdist_group("guards")


@pytest.mark.parametrize("fault", CONFIG, ids=lambda fault: fault.name)
def test_a_fault_of_the_configuration_is_told_by_its_key_before_anything_is_planned(fault):
    assert [text for text in of_config(fault.name) if text.startswith(fault.key)]


@pytest.mark.parametrize("fault", SAVES, ids=lambda fault: fault.name)
def test_a_fault_of_what_a_run_left_is_told(fault):
    assert fault.told in of_save(fault.name)


def test_without_a_fault_nothing_is_told(workspace):
    assert ConfigFault("none", "", "", {}).said() == []
    assert failure(toy.pipeline({"sft": toy.sft()})) == ""
