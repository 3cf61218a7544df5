from opdctl.settings import ReasoningGymTask, WordProblemTask
from opdctl.tasks import load_task
from opdctl.tasks.floor import constant_floor


def test_the_commonest_answer_is_the_floor_of_a_question_of_yes_and_no() -> None:
    settings = ReasoningGymTask(task="reasoning_gym", dataset="syllogism", rows=10, held_out=60)
    task = load_task("logic", settings, None)
    prompts = task.prompts("eval", 0, 0, task.size("eval") or 0)
    yes = sum(prompt.answer["answer"] == "Yes" for prompt in prompts) / len(prompts)
    assert constant_floor(task, prompts) == max(yes, 1 - yes)


def test_there_is_next_to_no_floor_where_answers_differ() -> None:
    task = load_task("words", WordProblemTask(task="word_problems", drills=8), None)
    assert constant_floor(task, task.prompts("eval", 0, 0, 100)) < 0.05
