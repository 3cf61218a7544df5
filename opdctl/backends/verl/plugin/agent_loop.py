"""Episodes in verl: the turns of the embedded engine (`opdctl/engine/episodes.py`), drawn by verl's servers.

verl finds the class by the column `agent_name` of opdctl's rows; others are answered at once by verl's own loop. The
model's tokens go into the sequence as the server gave them, with its log-probabilities; observations have mask 0, and
log-probability 0, which nothing reads. All turns of an episode have one request id, so that one server, which has the
beginning in its cache, draws them all.
"""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from opdctl.backends.verl.judge import unpack
from opdctl.backends.verl.plugin.rewards import Earned
from opdctl.backends.verl.plugin.told import fail, told
from opdctl.engine.episodes import Play, Start
from opdctl.engine.rows import Renderer
from opdctl.errors import OpdctlError
from opdctl.settings import TASKS, AnyTask, EffortSettings, Rollout
from opdctl.tasks import load_task
from opdctl.tasks.environment import EnvironmentTask

THREADS = 16  # episodes of a worker whose environments act at the same time


class EpisodeLoop(AgentLoopBase):  # type: ignore[misc]  # verl carries no types
    """One episode. verl makes an instance for each."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **row: Any) -> AgentLoopOutput:
        """An environment that fails is told to opdctl by a file, which ends the stage: verl would go on without the
        episode."""
        prompt_ids = await self.ct_build_initial_tokens([dict(message) for message in row["raw_prompt"]])
        try:
            start = _start(row, prompt_ids)
            with closing(start.task.environment(start.prompt, _renderer(self.tokenizer).calls)) as environment:
                return await self._played(Play(start, environment), sampling_params, int(priority), row)
        except OpdctlError as error:
            fail(error)

    async def _played(
        self, play: Play, sampling_params: dict[str, Any], priority: int, row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        options, renderer, loop = _options(), _renderer(self.tokenizer), asyncio.get_running_loop()
        assert options.turns is not None
        request, outputs, logprobs = uuid4().hex, [], list[float]()
        timing: dict[str, float] = {}
        while not play.over:
            logprobs += [0.0] * (len(play.written) - len(logprobs))  # of the observation
            with simple_timer("generate_sequences", timing):
                output = await self.server_manager.generate(
                    request_id=request,
                    prompt_ids=play.ids,
                    sampling_params=sampling_params | {"max_tokens": options.turns.max_turn_tokens},
                    priority=priority,
                )
            outputs.append(output)
            ids = [int(token) for token in output.token_ids]
            logprobs += [float(value) for value in output.log_probs or []]
            play.wrote(ids, ended=bool(ids) and ids[-1] in renderer.eos_ids)
            if not play.over:
                with simple_timer("tool_calls", timing):
                    step = await loop.run_in_executor(_threads(), play.environment.step, renderer.texts([ids])[0])
                play.heard(step, renderer, options)  # in this thread: tokenizers serve one at a time
        with simple_timer("compute_score", timing):
            verdict = await loop.run_in_executor(_threads(), play.environment.verdict)
        earned = _earned()(
            verdict,
            sum(play.learned),
            play.finished,
            row["extra_info"]["budget"],
            int(row["global_steps"]),
            taken=len(play.written),
        )
        return _output(play, outputs, earned, logprobs if sampling_params.get("logprobs") else None, timing)


def _output(
    play: Play,
    turns: Sequence[TokenOutput],
    earned: Mapping[str, Any],
    logprobs: list[float] | None,
    timing: Mapping[str, float],
) -> AgentLoopOutput:
    """A played episode as verl takes it."""
    preempted = [turn.num_preempted for turn in turns if turn.num_preempted is not None]
    return AgentLoopOutput(
        prompt_ids=list(play.start.ids),
        response_ids=play.written,
        response_mask=[int(learned) for learned in play.learned],
        response_logprobs=logprobs,
        reward_score=earned["reward_score"],
        num_turns=2 * len(turns),
        metrics=AgentLoopMetrics(**timing, num_preempted=sum(preempted) if preempted else -1),
        extra_fields={
            "reward_extra_info": earned["reward_extra_info"],
            "episode": dict(play.counts),
            "min_global_steps": turns[0].extra_fields.get("min_global_steps"),
            "max_global_steps": turns[-1].extra_fields.get("max_global_steps"),
            "turn_scores": [],
            "tool_rewards": [],
        },
    )


def _start(row: Mapping[str, Any], prompt_ids: list[int]) -> Start:
    settings, task = _task(row["extra_info"]["task"])
    prompt = unpack(row["reward_model"]["ground_truth"], settings)
    return Start(prompt, prompt_ids, task, key=0, sample=0)  # verl's server draws the random numbers


@cache
def _task(name: str) -> tuple[AnyTask, EnvironmentTask]:
    given = told()
    settings: AnyTask = TASKS[given["tasks"][name]["task"]].model_validate(given["tasks"][name])
    efforts = EffortSettings.model_validate(given["efforts"]) if given["efforts"] else None
    task = load_task(name, settings, efforts, Path(given["workspace"]))
    assert isinstance(task, EnvironmentTask)
    return settings, task


@cache
def _options() -> Rollout:
    return Rollout.model_validate(told()["rollout"])


@cache
def _earned() -> Earned:
    return Earned(told()["reward"])


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="environment")


@lru_cache(maxsize=1)
def _renderer(tokenizer: Any) -> Renderer:
    """By the model's own chat template: verl's tokenizer has one that leaves rendered prompts as they are."""
    own = copy.deepcopy(tokenizer)  # verl's threads use the other
    own.chat_template = told()["chat_template"]
    return Renderer(own, told()["eos_ids"])
