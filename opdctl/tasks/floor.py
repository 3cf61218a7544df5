"""What a model earns that answers every prompt alike: accuracy means little below that."""

from collections import Counter
from collections.abc import Sequence

from opdctl.tasks import Prompt, Task, verify_all
from opdctl.tasks.environment import EnvironmentTask

COMMONEST = 5  # reference answers that are tried
# an empty answer, a refusal, a yes, a number, and text that keeps many rules of form
PLAIN = ("", "I do not know.", "Yes", "0", "This is one sentence. This is another sentence.")


def constant_floor(task: Task, prompts: Sequence[Prompt]) -> float:
    """The best accuracy on the prompts of one answer to all of them, 0 to 1: of their commonest reference answers, the
    plain texts above, and the task's own `constants`, if it names any. 0 for tasks of several turns."""
    if isinstance(task, EnvironmentTask) or not prompts:
        return 0.0
    known = Counter(reference for prompt in prompts if (reference := task.reference(prompt)) is not None)
    constants: Sequence[str] = getattr(task, "constants", ())
    tried = dict.fromkeys([*(text for text, _ in known.most_common(COMMONEST)), *PLAIN, *constants])
    verdicts = verify_all(task, [(prompt, text) for text in tried for prompt in prompts])
    correct = [verdict.correct for verdict in verdicts]
    return max(sum(correct[i : i + len(prompts)]) for i in range(0, len(correct), len(prompts))) / len(prompts)
