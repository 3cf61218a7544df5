"""Where verl's processes meet on a machine: in the stage's own temporary folder.

verl/workers/rollout/vllm_rollout hands new weights to vLLM over a socket in /tmp that is named by Ray's job, and the
first job of every Ray cluster has the same name: two stages on one machine would load each other's weights.
"""

import tempfile
from types import ModuleType
from typing import Any

from opdctl.backends.verl.plugin.imports import when_imported


def install() -> None:
    """Takes effect in the two processes that the socket is between."""
    when_imported("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", _meet_in_private)


def _meet_in_private(transfer: ModuleType) -> None:
    for end in (transfer.BucketedWeightSender, transfer.BucketedWeightReceiver):
        _rename(end)


def _rename(end: Any) -> None:
    start = end.__init__

    def __init__(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        start(self, zmq_handle.replace("ipc:///tmp/", f"ipc://{tempfile.gettempdir()}/", 1), *args, **kwargs)

    end.__init__ = __init__
