import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdctl.errors import StageRefused
from opdctl.jail import Check, Jail, Limits, Program, Raised, isolation, pool, run_python
from opdctl.jail.values import decode, encode

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
)
KEYS = st.integers() | st.text(max_size=4) | st.tuples(st.integers(), st.text(max_size=4))
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def jail():
    with Jail(2) as jail:
        yield jail


@pytest.fixture(scope="module")
def contained():
    if why := isolation():
        pytest.skip(f"this machine cannot contain programs: {why}")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    return write


# -------------------------------------------------------------------------------------------------------- values


@given(VALUES)
def test_plain_values_come_back_as_they_were(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


def test_odd_numbers_come_back():
    values = [math.nan, math.inf, -math.inf, -0.0, -(2**63) - 1]
    assert repr(decode(encode(values))) == repr(values)
    assert decode(encode(10**5000)) == 10**5000  # more digits than Python writes


@pytest.mark.parametrize(
    "given",
    [{}, {"a": 1, "b": 2}, {"odd": 1}, {"int": "x"}, {"int": 3}, {"dict": [1]}, {"set": [[1]]}, {"tuple": "ab"}],
)
def test_what_is_no_value_is_refused(given):
    with pytest.raises(ValueError):
        decode(given)


# ----------------------------------------------------------------------------------------------------- functions


def test_outcomes_come_in_the_order_of_the_checks(jail):
    outcomes = jail.run([Check("math:sqrt", [float(i)]) for i in range(50)])
    assert [outcome.value for outcome in outcomes] == [math.sqrt(i) for i in range(50)]


def test_a_function_is_imported_once(modules):
    modules("counting", "import itertools\ncalls = itertools.count()\ndef count(): return next(calls)")
    with Jail(1) as one:
        assert [outcome.value for outcome in one.run([Check("counting:count", [])] * 3)] == [0, 1, 2]


def test_a_crash_a_hang_and_a_flood_cost_their_own_check_only(modules):
    modules(
        "bad",
        """
        import os, time
        def act(what):
            if what == "die": os._exit(3)
            if what == "segment": __import__("ctypes").string_at(0)
            if what == "sleep": time.sleep(60)
            if what == "spin":
                while True: pass
            if what == "flood": return "x" * 10**7
            if what == "memory": return len(bytearray(2**40))
            if what == "raise": raise KeyError("odd")
            if what == "leave": raise SystemExit(0)
            if what == "object": return object()
            return what
        """,
    )
    whats = ["die", "segment", "sleep", "spin", "flood", "memory", "raise", "leave", "object"]
    limits = Limits(cpu_s=0.5, wall_s=1.5, memory_mib=4096)
    with Jail(2) as own:
        checks = [Check("bad:act", [what], limits) for bad in whats for what in ("fine", bad)]
        outcomes = own.run(checks)
    assert [outcome.value for outcome in outcomes[::2]] == ["fine"] * len(whats)
    failures = dict(zip(whats, (outcome.failure for outcome in outcomes[1::2]), strict=True))
    spins = failures.pop("spin")
    assert spins == "time"
    assert failures == {
        "die": "crash",
        "segment": "crash",
        "sleep": "time",
        "flood": "output",
        "memory": "memory",
        "raise": "error",
        "leave": "error",
        "object": "error",
    }
    assert "KeyError: 'odd'" in outcomes[2 * whats.index("raise") + 1].detail


def test_a_function_has_an_empty_environment_no_network_and_a_folder_of_its_own(modules, tmp_path, monkeypatch):
    modules(
        "looking",
        """
        import os, socket, tempfile
        def look(outside):
            with tempfile.NamedTemporaryFile() as stream:
                kept = os.path.exists(stream.name)
            try:
                socket.socket()
                network = True
            except OSError:
                network = False
            try:
                open(outside, "w")
                wrote = True
            except OSError:
                wrote = False
            return [os.environ.get("OPDCTL_TOLD"), kept, network, wrote, sorted(os.listdir("/proc/self/fd"))[:-1]]
        """,
    )
    monkeypatch.setenv("OPDCTL_TOLD", "secret")
    with Jail(1) as own:
        [outcome] = own.run([Check("looking:look", [str(tmp_path / "outside")])])
    told, kept, network, wrote, descriptors = outcome.value
    assert (told, kept, network) == (None, True, False)
    assert len(descriptors) <= 5  # standard input, output and error, the host, and the listing itself
    assert wrote == bool(isolation())


def test_several_threads_may_ask_at_once(jail):
    found = {}

    def ask(number):
        found[number] = [outcome.value for outcome in jail.run([Check("math:sqrt", [float(number)])] * 20)]

    threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [math.sqrt(number)] * 20 for number in range(4)}


def test_what_a_function_prints_is_no_answer(jail):
    assert jail.run([Check("builtins:print", ['{"value": 1}'])])[0].value is None


def test_without_namespaces_functions_keep_their_limits_and_leave_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "_known", ["no namespaces"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    checks = [Check("os:getcwd", []), Check("socket:socket", []), Check("os:abort", []), Check("os:getcwd", [])]
    with Jail(1) as own:
        outcomes = own.run(checks)
    assert [outcome.failure for outcome in outcomes] == ["", "error", "crash", ""]
    assert Path(outcomes[0].value).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize("interpreter", ["auto", "cpython", "monty"])
def test_a_program_gives_the_values_of_its_calls(contained, jail, interpreter):
    if interpreter == "monty":
        pytest.importorskip("pydantic_monty")
    source = "def f(x):\n    print('seen', x)\n    return (x, [x], {x: {x}})"
    [outcome] = jail.run([Program(source, ["f(1)", "f('a')"], interpreter=interpreter)])
    assert outcome.value == [(1, [1], {1: {1}}), ("a", ["a"], {"a": {"a"}})]
    assert outcome.printed == "seen 1\nseen a\n"


def test_a_call_that_raises_costs_no_other(contained, jail):
    [outcome] = jail.run([Program("def f(x): return 1 / x", ["f(1)", "f(0)", "f(2)"])])
    assert outcome.value[::2] == [1.0, 0.5]
    assert isinstance(outcome.value[1], Raised)
    assert outcome.value[1].kind == "ZeroDivisionError"


def test_what_monty_lacks_is_left_to_cpython(contained, jail):
    source = "import heapq\ndef f(x):\n    yield from heapq.nsmallest(2, x)"
    assert jail.run([Program(source, ["list(f([3, 1, 2]))"])])[0].value == [[1, 2]]


def test_a_script_prints_and_fails_as_python_would(contained):
    outcome = run_python("if __name__ == '__main__':\n    print('here')\n    [][1]")
    assert (outcome.failure, outcome.printed) == ("error", "here\n")
    assert 'File "<program>", line 3' in outcome.detail
    assert "IndexError: list index out of range" in outcome.detail


def test_files_lie_in_the_programs_folder_and_do_not_outlive_it(contained, jail):
    program = Program("import part.one\nopen('new', 'w').write('x')", ["part.one.N"], {"part/one.py": "N = 7"})
    assert jail.run([program])[0].value == [7]
    assert run_python("import os", ["os.listdir('/tmp')"]).value == [[]]


def test_only_the_standard_library_can_be_imported(contained, jail):
    assert run_python("import json, heapq, decimal, sqlite3, ctypes").failure == ""
    assert "ModuleNotFoundError" in run_python("import pydantic").detail


def test_a_program_has_no_descriptor_but_its_own(contained):
    source = """
import os
def open_ones():
    for descriptor in range(1024):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        yield descriptor
"""
    assert len(run_python(source, ["list(open_ones())"]).value[0]) == 4  # standard ones, and its answer


def test_a_program_is_refused_where_it_cannot_be_contained(monkeypatch):
    monkeypatch.setattr(pool, "_known", ["no namespaces"])
    with pytest.raises(StageRefused, match="this machine cannot contain it .no namespaces") as caught:
        run_python("1")
    assert "user namespaces" in caught.value.hint


# --------------------------------------------------------------------------------------------------------- ends

HOST = """
import os, sys
from opdctl.jail import Jail, Limits, Program, Check
jail = Jail(2)
jail.run([Check("math:sqrt", [4.0]), Program("1")])
print(" ".join(str(s.process.pid) for w in jail._workers for s in (w._functions, w._programs) if s), flush=True)
long = Limits(cpu_s=60.0, wall_s=60.0)
jail.run([Program("while True: pass", limits=long), Check("time:sleep", [60.0], Limits(wall_s=60.0, memory_mib=4096))])
"""


def living(parents):
    """Processes that descend from these."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(path.parent.name) in parents and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def children(pid):
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def test_nothing_is_left_of_a_host_that_was_killed(contained, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(pool.__file__).parents[2])}
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, env=environment)
    with host:
        keepers = [int(word) for word in host.stdout.readline().split()]
        time.sleep(0.5)
        everyone = [pid for keeper in keepers for pid in children(keeper)]
        assert len(living(everyone)) > len(keepers)
        host.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while living(everyone) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(everyone) == []
    assert list(tmp_path.iterdir()) == []
