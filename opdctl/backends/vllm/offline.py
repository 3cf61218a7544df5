"""Our side of vLLM: a process for each model that is asked, questions by file, completions line by line."""

import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from opdctl import processes
from opdctl.backends.contract import Control, InputSpec, StageSpec, Stopped
from opdctl.backends.vllm import read_config
from opdctl.engine.checkpoint import load_vocabulary, save_new_model
from opdctl.engine.eval import Candidate, Progress
from opdctl.engine.rows import Renderer, stream_seed
from opdctl.engine.sampling import Completions
from opdctl.errors import ProgramDied, StageFailed, StageRefused
from opdctl.processes import Tree, guarded
from opdctl.settings import NewModel, Rollout
from opdctl.workers import VllmResources

PROGRAM = Path(__file__).with_name("worker.py")
CPU_KV_CACHE = 1 << 30  # bytes; VLLM_CPU_KVCACHE_SPACE (in GiB) of the user's environment goes first
CPU_BATCHED_TOKENS = 2048  # of one forward pass; a whole prompt has to fit
POLL_S = 0.2  # between two looks at a request to stop
DUMP_S = 2.0  # that a hung process gets to print its stacks
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process itself: one import less, and nothing to orphan
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # stages side by side would be bound to the same cores
    "TORCH_COMPILE_DISABLE": "1",  # the rank of a log-probability alone would be compiled for 7 s, with a C++ compiler
}


class Offline:
    """Opens the models of a stage, one at a time. Use as a context manager: at the end no process and file is left.

    `spec.workers` has `python`, `device` and `stall_timeout_s`.
    """

    def __init__(self, spec: StageSpec, control: Control, rollout: Rollout, resources: VllmResources) -> None:
        self.spec, self.control, self.rollout, self.resources = spec, control, rollout, resources
        self._open = ExitStack()
        self._loaded: tuple[str, Engine, Renderer] | None = None  # by the model's path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    @contextmanager
    def open(self, given: InputSpec) -> Iterator[Candidate]:
        """vLLM with a model loaded; one that is opened twice in a row is loaded once. Raises what `Process` does."""
        if self._loaded is None or self._loaded[0] != given.path:
            self._open.close()
            self._loaded = given.path, *self._load(given)
        _, engine, renderer = self._loaded
        engine.progress = Progress(self.spec, self.control, given.label)
        yield Candidate(engine.generate, renderer, batch=None)

    def _load(self, given: InputSpec) -> "tuple[Engine, Renderer]":
        tree = self._open.enter_context(guarded(Path(self.spec.events).parent))
        folder = given.path or self._made(tree.temp / "model")
        tokenizer, eos_ids, vocab_size = load_vocabulary(folder)
        arguments = self._arguments(folder)
        process = Process(self.spec, self.control, tree, given.label, arguments)
        self._open.callback(process.kill)
        process.reply("vllm")  # the model is loaded
        return Engine(process, eos_ids, vocab_size, arguments["max_model_len"]), Renderer(tokenizer, eos_ids)

    def _made(self, folder: Path) -> str:
        """A new model, where the input names none."""
        save_new_model(NewModel.model_validate(self.spec.new_model), self.spec.seed, folder)
        return str(folder)

    def _arguments(self, folder: str) -> dict[str, Any]:
        """vLLM's EngineArgs."""
        config = read_config(folder) or {}
        wanted = self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens
        arguments = {
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "safetensors",  # never a pickle
            "generation_config": "vllm",  # nothing but what a request says
            # "auto" would make a float32 checkpoint one of 16 bits
            "dtype": self.spec.config.get("precision") or config.get("dtype") or config.get("torch_dtype") or "float32",
            "max_model_len": min(wanted, config.get("max_position_embeddings") or wanted),
            "max_num_seqs": self.resources.max_num_seqs,
            "seed": 0,  # every request has its own
            "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
            "disable_log_stats": True,
        }
        if self.spec.workers["device"] == "cpu":
            return arguments | {
                "enforce_eager": True,
                "kv_cache_memory_bytes": CPU_KV_CACHE,
                # of a prompt that is read in parts vLLM takes back the first draws, which no CPU generator with a seed
                # can do: "CPU Generator does not use offset"
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, arguments["max_model_len"]),
            }
        return arguments | {
            "tensor_parallel_size": self.resources.tensor_parallel,
            "gpu_memory_utilization": self.resources.memory,
        }


class Process:
    """vLLM's side, see worker.py. Its stderr goes to `log`.

    Raises Stopped when asked to stop, and StageFailed where it ends, says what was not asked for, or says nothing for
    `stall_timeout_s`.
    """

    def __init__(self, spec: StageSpec, control: Control, tree: Tree, label: str, arguments: Mapping[str, Any]) -> None:
        self.control, self.label, self.log, self.temp = control, label, tree.attempt / "log.txt", tree.temp
        self.stall_timeout_s = float(spec.workers["stall_timeout_s"])
        cpu = spec.workers["device"] == "cpu"
        with open(self.log, "ab") as stderr:
            self.process = subprocess.Popen(
                [str(spec.workers["python"]), "-P", str(PROGRAM), json.dumps(arguments)],
                env={**os.environ, **ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {}), **tree.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests: IO[str] = self.process.stdin
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, replies: IO[str]) -> None:
        with replies:
            for line in replies:
                self._lines.put(line)
        self._lines.put(None)

    def request(self, content: Mapping[str, Any]) -> None:
        path = self.temp / "request.json"  # by file: a process that does not read would block a writer
        path.write_text(json.dumps(content))
        try:
            self._requests.write(f"{path}\n")
            self._requests.flush()
        except BrokenPipeError:
            self._ended()

    def reply(self, *keys: str) -> dict[str, Any]:
        """The next one, which has to have one of these keys."""
        heard = time.monotonic()
        while True:
            if self.control.stop_requested():
                raise Stopped
            try:
                line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - heard > self.stall_timeout_s:
                    self._hung()
                continue
            heard = time.monotonic()
            if line is None:
                self._ended()
            reply = _json(line)
            if "error" in reply:
                raise StageFailed(f"vLLM failed with {self.label}: {reply['error']}", hint=self._hint())
            if "alive" in reply:
                continue
            if not any(key in reply for key in keys):
                self.wrong(f"{line[:200]!r} instead of {' or '.join(keys)}")
            return reply

    def wrong(self, what: str) -> NoReturn:
        raise StageFailed(f"vLLM's process for {self.label} answered {what}", hint=self._hint())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._requests.close()

    def _ended(self) -> NoReturn:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        kind = ProgramDied if processes.killed(code) else StageFailed
        raise kind(f"vLLM's process for {self.label} {how}", hint=self._hint())

    def _hung(self) -> NoReturn:
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(DUMP_S)
        raise StageFailed(
            f"vLLM's process for {self.label} gave no sign of life for workers.vllm.stall_timeout_s = "
            f"{self.stall_timeout_s:g} seconds, and was ended",
            hint=self._hint("where it hangs"),
        )

    def _hint(self, what: str = "why") -> str:
        return f"the log tells {what}: {self.log}"


class Engine:
    """Generation by a vLLM process."""

    progress: Progress

    def __init__(self, process: Process, eos_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
        self.process, self.eos_ids, self.vocab_size = process, eos_ids, vocab_size
        self.max_model_len = max_model_len

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        max_completion_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        keys: Sequence[int],
    ) -> Completions:
        """As `engine.sampling.Generate` says.

        Raises StageRefused for prompts that leave no room for a completion, and what `Process` does.
        """
        longest = max(map(len, prompts)) + max_completion_tokens
        if longest > self.max_model_len:
            raise StageRefused(
                f"a prompt and its completion may have {longest} tokens, and {self.process.label} has "
                f"max_position_embeddings {self.max_model_len}",
                hint="lower config.rollout.max_completion_tokens or max_prompt_tokens, or use a model with more",
            )
        import torch

        request = {
            "prompts": [list(prompt) for prompt in prompts],
            "seeds": [[stream_seed(seed, key, sample) for sample in range(group_size)] for key in keys],
            "sampling": {
                "max_tokens": max_completion_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "stop_token_ids": list(self.eos_ids),
                "ignore_eos": True,  # but for those
            },
        }
        self.process.request(request)
        drawn = self._collect(len(prompts), group_size, max_completion_tokens)
        return Completions(
            [tokens for tokens, _ in drawn],
            [tokens[-1] in self.eos_ids for tokens, _ in drawn],
            torch.tensor([logprob for _, logprobs in drawn for logprob in logprobs], dtype=torch.float32),
        )

    def _collect(self, prompts: int, group_size: int, most: int) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities, prompt-major, of every completion that was asked for."""
        found: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        missing = {(p, s) for p in range(prompts) for s in range(group_size)}
        wanted = len(missing)
        while "done" not in (reply := self.process.reply("index", "done")):
            try:
                index, tokens, logprobs = tuple(reply["index"]), reply["token_ids"], reply["logprobs"]
                stopped = tokens[-1] in self.eos_ids
                sound = (
                    index in missing
                    and len(tokens) == len(logprobs) <= most
                    and all(type(token) is int and 0 <= token < self.vocab_size for token in tokens)
                    and all(-math.inf < logprob <= 0 for logprob in logprobs)
                    and (stopped or len(tokens) == most)
                    and not any(token in self.eos_ids for token in tokens[:-1])
                )
            except (KeyError, TypeError, IndexError):
                sound = False
            if not sound:
                self.process.wrong(f"with a completion that cannot be: {str(reply)[:200]}")
            missing.remove(index)
            found[index] = tokens, logprobs
            self.progress.tell(len(found), wanted)
        if missing:
            self.process.wrong(f"with {len(found)} completions instead of {wanted}")
        return [found[index] for index in sorted(found)]


def _json(line: str) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}
