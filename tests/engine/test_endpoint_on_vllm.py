"""vLLM's own server as a judge, on the CPU: it says what the same model says in the embedded engine."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from engine import stages

from opdctl.backends.contract import InputSpec
from opdctl.engine.endpoint import Client
from opdctl.engine.loop import open_policy
from opdctl.engine.rows import Renderer
from opdctl.engine.sampling import sample
from opdctl.errors import StageRefused
from opdctl.settings import ChainTask, EffortSettings, Endpoint
from opdctl.tasks import load_task

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", stages.ROOT / ".venv-verl/bin/python"))
pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: no such file (`make verl-env`)"),
    pytest.mark.xdist_group("vllm"),  # it takes all cores
]
KEY = "sk-of-this-test"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
START_S = 300


@contextmanager
def served(folder, log):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "judge"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "16"]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT)
        try:
            until = time.monotonic() + START_S
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < until, log.read_text()[-2000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_vllms_server_says_what_the_embedded_engine_does(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)
    model = {**stages.MODEL, "shape": {**stages.MODEL["shape"], "head_dim": 32}}  # a size that vLLM knows on a CPU
    trained = replace(stages.sft(tmp_path / "sft", steps=60), new_model=model)
    stages.run(trained)
    task = load_task(
        "math", ChainTask.model_validate(stages.TASKS["math"]), EffortSettings.model_validate(stages.EFFORTS)
    )
    prompts = task.prompts("eval", 0, 0, 16, "max")
    policy, tokenizer = open_policy(trained, InputSpec("grader", "judge", trained.output))
    renderer = Renderer(tokenizer, policy.eos_ids)
    options = {"max_completion_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 1}
    drawn = partial(sample, policy)(renderer.prompts(prompts, 64), group_size=1, seed=0, keys=range(16), **options)
    own = [text.split() for text in renderer.texts(drawn.completions)]
    there = {"model": "judge", "key_variable": "JUDGE_KEY", "concurrent": 4}
    with served(trained.output, tmp_path / "server.log") as url:
        client = Client(Endpoint(url=url, **there))
        asked = [prompt.text for prompt in prompts]
        said = client.complete(asked, max_tokens=6, temperature=0.0, seeds=list(range(16)))
        assert [text.split() for text in said] == own
        drawn_twice = [client.complete(asked, max_tokens=6, temperature=1.0, seeds=list(range(16))) for _ in range(2)]
        assert drawn_twice[0] == drawn_twice[1]
        assert drawn_twice[0] != said
        with pytest.raises(StageRefused, match="refused: 401"):
            Client(Endpoint(url=url, model="judge")).complete(asked[:1], max_tokens=6, temperature=0.0, seeds=[0])
