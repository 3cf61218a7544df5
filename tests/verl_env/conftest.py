"""The process is made one of verl's on a CPU, as `opdctl.backends.verl.render` would start it."""

import json
import os
import sys
from pathlib import Path

BACKEND = Path(__file__).resolve().parents[2] / "opdctl" / "backends" / "verl"
BOOTSTRAP = [str(BACKEND / "bootstrap"), str(BACKEND / "bootstrap" / "cpu")]
os.environ |= {
    "PYTHONPATH": os.pathsep.join(BOOTSTRAP),  # for children
    "VERL_USE_EXTERNAL_MODULES": "opdctl_verl",
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
sys.path[:0] = BOOTSTRAP

import pytest  # noqa: E402 -- after the environment
import torch  # noqa: E402
import verl  # noqa: E402, F401 -- loads the plug-in

torch.set_num_threads(1)


@pytest.fixture
def tell(tmp_path, monkeypatch):
    """tell(settings): what the plug-in is told of its stage."""
    from opdctl.backends.verl.layout import SETTINGS_VARIABLE
    from opdctl.backends.verl.plugin.told import told

    def write(settings):
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(settings))
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
        told.cache_clear()

    yield write
    told.cache_clear()
