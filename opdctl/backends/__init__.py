"""Who carries out a stage: modules that satisfy the `Backend` protocol, by the name that a pipeline file gives.

Their own module level imports nothing heavy: the plan asks for REVISION, the runner for `check`; only a worker runs.
"""

from opdctl.backends import embedded, verl, vllm
from opdctl.backends.contract import Backend

BACKENDS: dict[str, Backend] = {"embedded": embedded, "verl": verl, "vllm": vllm}
