from opdctl.scheduler import Pool, Schedule
from opdctl.settings import Machine, Resources


def test_the_stage_with_the_longest_remaining_chain_is_ready_first():
    schedule = Schedule({"short": [], "root": [], "middle": ["root"], "leaf": ["middle"]})
    assert schedule.ready() == ["root", "short"]


def test_a_stage_is_ready_once_all_its_parents_are_done():
    schedule = Schedule({"a": [], "b": [], "c": ["a", "b"]})
    schedule.start("a")
    schedule.start("b")
    schedule.done("a")
    assert schedule.ready() == []
    schedule.done("b")
    assert schedule.ready() == ["c"]


def test_parents_outside_the_schedule_are_finished_already():
    assert Schedule({"child": ["finished elsewhere"]}).ready() == ["child"]


def test_a_failed_stage_drops_all_that_depends_on_it_and_nothing_else():
    schedule = Schedule({"bad": [], "good": [], "child": ["bad"], "grandchild": ["child"], "other": ["good"]})
    schedule.start("bad")
    assert schedule.failed("bad") == ["child", "grandchild"]
    assert schedule.ready() == ["good"]


def test_gpus_are_leased_by_number_and_come_back():
    pool = Pool(Machine(slots=3, cpus=3, gpus=2))
    first, second = pool.take(Resources(gpus=1)), pool.take(Resources(gpus=1))
    assert (first.devices, second.devices) == ((0,), (1,))
    assert pool.take(Resources(gpus=1)) is None
    pool.give_back(first)
    assert pool.take(Resources(gpus=1)).devices == (0,)


def test_nothing_is_taken_from_a_pool_that_lacks_one_of_the_resources():
    pool = Pool(Machine(slots=2, cpus=2))
    assert pool.take(Resources(slots=1, cpus=3)) is None
    assert pool.take(Resources(slots=2, cpus=2)) is not None
