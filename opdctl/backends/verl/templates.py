"""The chat template that verl is given: contents one after another, nothing added.

opdctl renders every prompt itself, whether a task's template is raw or the model's own, so that a model reads the same
token ids on every backend. The text of EOS is part of a demonstration's content.
"""

VERBATIM = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
