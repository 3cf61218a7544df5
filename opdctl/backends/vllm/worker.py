"""The side of vLLM: a program for an environment that has vLLM and not opdctl. It imports nothing of ours.

    python -P worker.py '{"model": FOLDER, ... vLLM's EngineArgs ...}'

Its input is a line for each request, the path of a JSON file:
    {"prompts": [[token, ...], ...], "seeds": [[seed of each completion], ... a list for each prompt],
     "sampling": {... vLLM's SamplingParams ...}}
Its output is JSON, a line each:
    {"vllm": VERSION}             once, when the model is loaded
    {"alive": true}               at most every second while completions are drawn
    {"index": [prompt, sample], "token_ids": [...], "logprobs": [...], "finish_reason": ...}
    {"done": NUMBER}              after the completions of a request, how many they were
    {"error": TEXT}               before it ends with exit code 1; the traceback goes to stderr
What vLLM prints goes to stderr. SIGUSR1 prints the stacks of all threads there.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, TextIO

ALIVE_S = 1.0


def main(arguments: dict[str, Any], requests: TextIO, replies: TextIO) -> None:
    engine, version = load(arguments)
    tell(replies, {"vllm": version})
    for line in requests:
        with open(line.rstrip("\n")) as stream:
            request = json.load(stream)
        generate(engine, request, replies)


def load(arguments: dict[str, Any]) -> tuple[Any, str]:
    """vLLM's engine for these EngineArgs, and vLLM's version."""
    import vllm

    return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments)), vllm.__version__


def generate(engine: Any, request: dict[str, Any], replies: TextIO) -> None:
    """All completions of a request, in the order in which they end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    last = RequestOutputKind.FINAL_ONLY
    prompts = engine.renderer.render_cmpl([{"prompt_token_ids": tokens} for tokens in request["prompts"]])
    for p, (prompt, seeds) in enumerate(zip(prompts, request["seeds"], strict=True)):
        for s, seed in enumerate(seeds):
            # one request a completion: each has a seed of its own, and is told when it ends
            options = SamplingParams(**request["sampling"], seed=seed, logprobs=0, detokenize=False, output_kind=last)
            engine.add_request(f"{p}.{s}", prompt, options)
    done, told = 0, time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tell(replies, _completion(output))
                done += 1
        if time.monotonic() - told > ALIVE_S:
            tell(replies, {"alive": True})
            told = time.monotonic()
    tell(replies, {"done": done})


def _completion(output: Any) -> dict[str, Any]:
    [drawn] = output.outputs
    tokens = [int(token) for token in drawn.token_ids]
    return {
        "index": [int(part) for part in output.request_id.split(".")],
        "token_ids": tokens,
        "logprobs": [step[token].logprob for token, step in zip(tokens, drawn.logprobs, strict=True)],
        "finish_reason": drawn.finish_reason,
    }


def tell(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)
    try:
        main(json.loads(sys.argv[1]), sys.stdin, channel)
    except Exception as error:
        traceback.print_exc()
        tell(channel, {"error": "".join(traceback.format_exception_only(error)).strip()})
        sys.exit(1)
