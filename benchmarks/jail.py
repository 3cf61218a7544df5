"""Checks per second in the jail, and against what is often used instead: a fresh process for every check.

    python benchmarks/jail.py [checks]

Both sides judge the same completions with as many workers as this machine has cores. math: Math-Verify on answers that
need it; its peer starts an interpreter for each check. code: functions with a loop; its peer is a plain subprocess with
the tests behind the program, without isolation, as the executor of HumanEval works.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os import sched_getaffinity

from opdctl.jail import Jail, Program, isolation
from opdctl.tasks import verifiers

WORKERS = len(sched_getaffinity(0))
MATH = [
    (f"So the answer is $\\boxed{{\\frac{{{2 * i}}}{{{4 * i + 2}}}}}$.", f"\\frac{{{i}}}{{{2 * i + 1}}}")
    for i in range(1, 10_000)
]
FRESH = "from opdctl.tasks.verifiers import math_verify; import sys; sys.exit(not math_verify(*sys.argv[1:]).correct)"
CODE = "def f(n):\n    total = 0\n    for i in range(n):\n        total += i % 7\n    return total\n"


def rate(count: int, work: Callable[[], list[bool]]) -> float:
    """Checks per second; each must be judged right."""
    begin = time.perf_counter()
    right = work()
    seconds = time.perf_counter() - begin
    assert len(right) == count, (len(right), count)
    assert all(right)
    return count / seconds


def fresh(arguments: list[list[str]]) -> list[bool]:
    """One interpreter for each list of arguments; right where its exit code is 0."""
    with ThreadPoolExecutor(WORKERS) as threads:
        return list(
            threads.map(lambda given: not subprocess.run([sys.executable, *given], check=False).returncode, arguments)
        )


def math(count: int) -> tuple[float, float]:
    judge = verifiers.resolve("math_verify")
    judge(MATH[:WORKERS] * 2)  # starts the workers
    own = rate(count, lambda: [verdict.correct for verdict in judge(MATH[:count])])
    few = max(4, count // 100)
    return own, rate(few, lambda: fresh([["-c", FRESH, *pair] for pair in MATH[:few]]))


def code(count: int, interpreter: str) -> tuple[float, float]:
    def expected(n: int) -> int:
        return sum(i % 7 for i in range(n))

    numbers = [100 + i for i in range(count)]
    with Jail(WORKERS) as jail:
        programs = [Program(CODE, [f"f({n})"], interpreter=interpreter) for n in numbers]  # type: ignore[arg-type]  # a literal
        jail.run(programs[: 2 * WORKERS])
        outcomes = rate(
            count, lambda: [o.value == [expected(n)] for o, n in zip(jail.run(programs), numbers, strict=True)]
        )
    few = max(8, count // 5)
    tests = [["-I", "-S", "-c", f"{CODE}assert f({n}) == {expected(n)}"] for n in numbers[:few]]
    return outcomes, rate(few, lambda: fresh(tests))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{WORKERS} workers, {count} checks; checks/s\n")
    print(f"{'':16}{'jail':>8}{'peer':>8}{'ratio':>8}")
    rows = {"math": math(count)}
    if why := isolation():
        print(f"no code: this machine cannot contain it: {why}")
    else:
        rows |= {f"code, {name}": code(count, name) for name in ("cpython", "auto")}
    for name, (own, peer) in rows.items():
        print(f"{name:16}{own:8.0f}{peer:8.0f}{own / peer:8.1f}")


if __name__ == "__main__":
    main()
