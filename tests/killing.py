"""SIGKILL between two system calls, in this process."""

import os


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the code does afterwards may be needed."""


CHANGING = ("replace", "symlink", "unlink", "rmdir", "mkdir", "fsync", "open", "link", "rename")


def kill_at(patch, number: int, calls=CHANGING) -> None:
    """The number-th call that changes or flushes something on disk dies before it does."""
    count = iter(range(10**9))

    def dying(real):
        def call(*args, **kwargs):
            if next(count) == number:
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in calls:
        patch.setattr(os, name, dying(getattr(os, name)))
