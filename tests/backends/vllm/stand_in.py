"""In place of vLLM's environment: speaks what opdctl/backends/vllm/worker.py speaks, and misbehaves as its first
argument says. What it was given goes to the log, a line of JSON each time."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time

mode, arguments = sys.argv[1], json.loads(sys.argv[4])


def note(**what):
    print(json.dumps(what), file=sys.stderr, flush=True)


def tell(**reply):
    print(json.dumps(reply), flush=True)


faulthandler.register(signal.SIGUSR1)
note(arguments=arguments)
if mode == "cannot load":
    tell(error="ValueError: this architecture is unknown")
    sys.exit(1)
if mode == "hangs while loading":
    note(child=subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)
tell(vllm="stand-in")
for line in sys.stdin:
    with open(line.strip()) as stream:
        request = json.load(stream)
    note(request=request)
    end, tokens = request["sampling"]["stop_token_ids"][0], request["sampling"]["max_tokens"]
    answers = [
        {"index": [p, s], "token_ids": [5, end], "logprobs": [-0.5, -1.5], "finish_reason": "stop"}
        for p, seeds in enumerate(request["seeds"])
        for s, _ in enumerate(seeds)
    ]
    if mode == "hangs":
        time.sleep(600)
    elif mode == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "exits":
        sys.exit(3)
    elif mode == "prints":
        print("INFO: all is well", flush=True)
    elif mode == "loses one":
        answers.pop()
    elif mode == "repeats one":
        answers.append(answers[0])
    elif mode == "invents a prompt":
        answers[0]["index"] = [len(answers), 0]
    elif mode == "invents a token":
        answers[0]["token_ids"] = [10**6, end]
    elif mode == "goes past the end":
        answers[0]["token_ids"] = [end, end]
    elif mode == "gives up early":
        answers[0]["token_ids"] = [5, 5]
    elif mode == "goes past the limit":
        answers[0]["token_ids"], answers[0]["logprobs"] = [*[5] * tokens, end], [-1.0] * (tokens + 1)
    elif mode == "says nan":
        answers[0]["logprobs"] = [float("nan"), -1.0]
    elif mode == "never ends":
        answers = [{**answer, "token_ids": [5] * tokens, "logprobs": [-1.0] * tokens} for answer in answers]
    for answer in reversed(answers):  # in the order in which they end
        tell(**answer)
    tell(done=len(answers))
