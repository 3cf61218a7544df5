"""Faults that show before a stage trains are named by their check; the same stages without them pass without a word."""

import pytest
from guards.gate_faults import GATE
from guards.outcomes import judged, of_gate, severity

pytestmark = pytest.mark.xdist_group("guards")  # with --dist loadgroup one process trains the models for all of them


@pytest.mark.parametrize("fault", GATE, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_before_launch(fault):
    verdict = of_gate(fault.name)
    assert verdict is not None
    assert severity(verdict.outcome) >= severity(fault.outcome), verdict
    assert verdict.evidence
    assert verdict.remedy


@pytest.mark.parametrize("fault", GATE, ids=lambda fault: fault.name)
def test_the_same_without_the_fault_passes_without_a_word(fault):
    assert [verdict for verdict in judged(fault, "healthy") if verdict.outcome != "go"] == []
