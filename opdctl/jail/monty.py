"""Python without CPython: Monty, an interpreter in Rust that knows neither files nor network. A trusted function of the
jail's (`Check`), whose answer is that of `inside._run`."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from opdctl.jail.values import encode


@lru_cache(maxsize=1)
def installed() -> bool:
    return find_spec("pydantic_monty") is not None


@lru_cache(maxsize=1)
def _interpreters() -> Any:
    from pydantic_monty import Monty

    return Monty(max_processes=1, max_checkouts_per_worker=1000).__enter__()


def run(source: str, calls: Sequence[str], cpu_s: float, memory_mib: int, output: int) -> dict[str, Any]:
    """{"values": [...], "printed": ...}; {"raised": [kind, message], "printed": ...} for what raises, the source or a
    call, or returns no plain data; {"memory": True}, {"time": True}."""
    from pydantic_monty import CollectString, MontyCrashedError, MontyError, MontyRuntimeError

    limits = {"max_feed_duration_secs": cpu_s, "max_memory": memory_mib * 2**20, "max_total_sleep_secs": 0.0}
    printed = CollectString(output)
    try:
        with _interpreters().checkout(limits=limits) as session:
            session.feed_run(source, print_callback=printed)
            values = [encode(session.feed_run(call, print_callback=printed)) for call in calls]
    except MontyCrashedError as error:
        return {"time": True} if error.timed_out else {"raised": ["MontyCrashedError", str(error)]}
    except MontyError as error:
        inner = error.exception()
        if isinstance(inner, TimeoutError):
            return {"time": True, "printed": printed.output}
        if isinstance(inner, MemoryError):
            return {"memory": True, "printed": printed.output}
        shown = error.display() if isinstance(error, MontyRuntimeError) else str(error)
        return {"raised": [type(inner).__name__, shown], "printed": printed.output}
    except (TypeError, RecursionError) as error:  # of encode
        return {"raised": [type(error).__name__, str(error)], "printed": printed.output}
    return {"values": values, "printed": printed.output}
