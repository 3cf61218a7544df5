"""What holds for all tasks with tools."""

import json

import pytest
from tasks.environments.episodes import FORMAT, asked, call, played, resumed, script

from opdctl.jail import isolation
from opdctl.settings import CalculatorTask, EffortSettings, PythonTask, RepositoryTask, SearchTask
from opdctl.tasks import is_held_out, load_task
from opdctl.tasks.environment import EnvironmentTask
from opdctl.tasks.environments.tool_task import CALLS, ToolTask, final_answer

ALL = [
    CalculatorTask(task="calculator"),
    PythonTask(task="python_tool"),
    SearchTask(task="search", people=60),
    RepositoryTask(task="repository"),
]


@pytest.fixture(params=ALL, ids=[settings.task for settings in ALL])
def task(request: pytest.FixtureRequest) -> ToolTask:
    if request.param.task in ("python_tool", "repository") and (why := isolation()):
        pytest.skip(f"this machine cannot contain programs: {why}")
    found = load_task("it", request.param, None)
    assert isinstance(found, ToolTask)
    return found


def test_a_task_with_tools_is_played_in_turns(task: ToolTask) -> None:
    assert isinstance(task, EnvironmentTask)


def test_the_expert_solves_what_it_shows(task: ToolTask) -> None:
    for shown in task.demonstrations(0, 0, 6):
        verdict = played(task, shown.prompt, *script(task, shown.prompt))
        assert (verdict.correct, verdict.reward) == (True, 1.0)
        assert all(not turn.observation.startswith("Error") for turn in shown.turns)


@pytest.mark.parametrize("action", ["", "Answer:", "Answer: ", "I do not know.", "Answer: 0 or 1"])
def test_an_answer_that_says_nothing_earns_nothing(task: ToolTask, action: str) -> None:
    assert played(task, asked(task), action).reward == 0.0


def test_an_episode_that_has_not_ended_earns_nothing(task: ToolTask) -> None:
    prompt = asked(task)
    verdict = played(task, prompt, *script(task, prompt)[:-1])
    assert verdict.reward == 0.0
    assert verdict.details["reason"] == "the episode has not ended"


def test_an_episode_goes_on_where_its_state_was_saved(task: ToolTask) -> None:
    prompt = asked(task, 1)
    actions = script(task, prompt)
    for at in range(len(actions)):
        first = task.environment(prompt, FORMAT)
        before = [first.step(action) for action in actions[:at]]
        other = resumed(task, prompt, first)
        after = [other.step(action) for action in actions[at:]]
        whole = task.environment(prompt, FORMAT)
        assert [whole.step(action) for action in actions] == before + after
        assert resumed(task, prompt, other).verdict() == whole.verdict()


def test_prompts_are_the_same_each_time_and_plain_json(task: ToolTask) -> None:
    prompts = task.prompts("train", 3, 5, 4)
    assert prompts == task.prompts("train", 3, 5, 4)
    assert prompts[2:] == task.prompts("train", 3, 7, 2)
    assert prompts != task.prompts("train", 4, 5, 4)
    assert json.loads(json.dumps([dict(prompt.answer) for prompt in prompts])) == [prompt.answer for prompt in prompts]


def test_no_problem_is_in_both_splits(task: ToolTask) -> None:
    seen = {split: {task.content(p.answer) for p in task.prompts(split, 0, 0, 40)} for split in ("train", "eval")}
    assert not seen["train"] & seen["eval"]
    assert all(is_held_out(content, 0.1) for content in seen["eval"])


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("<tool_call>{oops}</tool_call>", "not JSON"),
        (call("no_such_tool"), "no tool 'no_such_tool'; there are: "),
        (call("TOOL", wrong="x"), "wanted: TOOL("),
        (call("TOOL", ARGUMENT=3), "wanted: TOOL("),
        ("\n".join([call("TOOL")] * (CALLS + 1)), "at most 4"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong_and_the_episode_goes_on(task: ToolTask, action: str, told: str) -> None:
    prompt = asked(task)
    function = next(tool["function"] for tool in prompt.tools if tool["function"]["parameters"]["required"])
    argument = function["parameters"]["required"][0]
    episode = task.environment(prompt, FORMAT)
    step = episode.step(action.replace("TOOL", function["name"]).replace("ARGUMENT", argument))
    assert step.observation.startswith("Error: ")
    assert told.replace("TOOL", function["name"]) in step.observation
    assert not step.done
    assert (step.counts["calls"] >= 1, step.counts["valid_calls"]) == (True, 0.0)
    for right in script(task, prompt):
        episode.step(right)
    assert episode.verdict().correct


def test_right_calls_are_counted(task: ToolTask) -> None:
    prompt = asked(task)
    step = task.environment(prompt, FORMAT).step(script(task, prompt)[0])
    assert step.counts == {"calls": 1.0, "valid_calls": 1.0}


def test_efforts_are_asked_for_as_the_pipeline_says() -> None:
    by_token = EffortSettings(by="control_token", levels={"low": "<low>"})
    by_prompt = EffortSettings(by="system_prompt", levels={"low": "Be brief."})
    [token] = load_task("it", ALL[0], by_token).prompts("train", 0, 0, 1, "low")
    [prompt] = load_task("it", ALL[0], by_prompt).prompts("train", 0, 0, 1, "low")
    assert token.messages[1]["content"].endswith("? <low>")
    assert prompt.messages[0]["content"].endswith("\n\nBe brief.")
    assert token.columns == {"domain": "it", "effort": "low"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\nAnswer: 4", "4"),
        ("Answer: 3\nAnswer: 4\n", "4"),
        ("<think>Answer: 4</think>", None),
        ("The answer is 4", None),
        ("Answer: 4\nor so", None),
    ],
)
def test_the_final_answer_is_what_the_last_line_says(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer
