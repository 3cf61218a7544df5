"""Every row finds its teacher; no more teachers are in memory than allowed."""

import gc
import threading
import weakref

import pytest

from opdctl.backends.contract import InputSpec
from opdctl.engine.teachers import Router, TeacherPool
from opdctl.errors import StageRefused


def teacher(domain: str, effort: str) -> InputSpec:
    return InputSpec("teachers", f"{effort}[domain={domain}]", "folder", {"domain": domain, "effort": effort})


TEACHERS = [teacher("math", "low"), teacher("math", "max"), teacher("code", "low")]


def test_a_row_goes_to_the_teacher_of_its_columns():
    router = Router(TEACHERS, ["domain", "effort"], None)
    assert router.teacher({"domain": "code", "effort": "low", "source": "x"}) == 2
    assert router.teacher({"domain": "math", "effort": "max"}) == 1


def test_a_row_without_a_route_is_refused_by_its_columns():
    router = Router(TEACHERS, ["domain", "effort"], None)
    with pytest.raises(StageRefused, match="domain=code, effort=max"):
        router.teacher({"domain": "code", "effort": "max"})


def test_a_default_teacher_takes_what_has_no_route():
    router = Router(TEACHERS, ["domain", "effort"], "max[domain=math]")
    assert router.teacher({"domain": "code", "effort": "max"}) == 1


class Model:
    """Stands where a policy would: the pool never looks inside."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_no_more_models_live_than_are_resident(resident):
    alive: weakref.WeakSet[Model] = weakref.WeakSet()
    most = 0
    lock = threading.Lock()

    def load(number: int) -> Model:
        nonlocal most
        model = Model(number)
        with lock:
            alive.add(model)
            gc.collect()
            most = max(most, len(alive))
        return model

    pool = TeacherPool(load, resident=resident)
    order = [0, 1, 2, 3] * 3
    for number, then in zip(order, [*order[1:], None], strict=True):
        assert pool.get(number, then=then).number == number
    pool.close()
    assert most <= resident


def test_the_next_teacher_is_loaded_while_this_one_works():
    loaded: list[int] = []
    second = threading.Event()

    def load(number: int) -> Model:
        loaded.append(number)
        if number == 1:
            second.set()
        return Model(number)

    pool = TeacherPool(load, resident=2)
    pool.get(0, then=1)
    assert second.wait(5)
    pool.get(1)
    assert loaded == [0, 1]
    pool.close()


def test_resident_teachers_are_not_loaded_again():
    pool = TeacherPool(Model, resident=3)
    for number in [0, 1, 2] * 5:
        pool.get(number)
    assert pool.loads == 3
