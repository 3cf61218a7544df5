"""Faults that show while a stage runs are named within five steps; streams of healthy stages raise no alarm."""

import pytest
from guards.outcomes import of_stream
from guards.streams import KINDS, Stream, healthy, watched
from guards.watch_faults import STREAMS

pytestmark = pytest.mark.xdist_group("guards")
WITHIN = 5  # steps


@pytest.mark.parametrize("fault", STREAMS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_within_five_steps_and_nothing_else_is(fault):
    first, *others = of_stream(fault.name)
    assert first.rule == fault.rule
    assert fault.start - 1 <= first.step < fault.start + WITHIN
    assert {alarm.rule for alarm in others} <= {fault.rule}
    assert first.evidence
    assert first.causes


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_stream_raises_no_alarm(kind, seed):
    assert watched(Stream(kind, healthy(kind, seed=seed))) == []
