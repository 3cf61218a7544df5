"""What a jail is asked, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Failure = Literal["", "time", "memory", "output", "error", "crash"]


@dataclass(frozen=True)
class Limits:
    """What one check may take. CPU time decides where it can: wall time would judge by the load of the machine."""

    cpu_s: float = 3.0  # rounded up to whole seconds for programs
    wall_s: float = 30.0
    memory_mib: int = 1024  # address space of a process
    processes: int = 1  # of a program, threads included
    file_mib: int = 16  # of one file, and of all files of a program together
    output_kib: int = 64  # of the value as JSON, and of what is printed


PROGRAM = Limits(wall_s=10.0)
FUNCTION = Limits(memory_mib=4096)


@dataclass(frozen=True)
class Check:
    """A call of a function that is trusted, on arguments that are not."""

    function: str  # "package.module:function", found as this process would find it
    arguments: Sequence[Any]  # JSON
    limits: Limits = FUNCTION
    imports: Sequence[str] = ()  # modules that the function imports late: before its time begins


@dataclass(frozen=True)
class Program:
    """Python that nobody trusts. Nothing that it could use to look right belongs into it: no expected value."""

    source: str
    calls: Sequence[str] = ()  # expressions, evaluated one after another once the source has run
    files: Mapping[str, str] = field(default_factory=dict)  # path in its folder, which is also on `sys.path` -> text
    # auto: what Monty computes is taken, what it cannot (much of the standard library, some of the language) or what
    # raises there is left to CPython, whose word is final. `files` are for CPython alone
    interpreter: Literal["auto", "monty", "cpython"] = "auto"
    limits: Limits = PROGRAM


@dataclass(frozen=True)
class Outcome:
    """`value`: what the function returned, or the values of the calls, a `Raised` for one that raised.

    failure | meaning
    ""      | there is a value
    time    | more CPU or wall time than the limits allow
    memory  | more memory
    output  | a longer value, or more printed, than they allow
    error   | the function or the source raised; `detail` tells what
    crash   | the process ended without an answer: exit, a signal, an answer that is none
    """

    value: Any
    failure: Failure = ""
    detail: str = ""
    printed: str = ""  # by a program, on both streams
