"""The rules about teachers: one that has lost its weights, and rows that are not mixed. As in rules.py."""

from dataclasses import dataclass, field

from opdctl.settings import watch as settings
from opdctl.watchdog.series import Finding, Point, Streak, known, since

CANARY = "teacher_canary/"


@dataclass
class TeacherConstant:
    rule: settings.TeacherConstant
    streak: Streak = field(default_factory=Streak)

    def see(self, point: Point) -> Finding | None:
        if found := self._canary(point):  # of fixed tokens: no noise to wait for
            return found
        told, values = self._told(point)
        if self.streak.add(bool(told), point.step) < self.rule.steps:
            return None
        return Finding(f"{told}, {since(self.streak)}", values)

    def _canary(self, point: Point) -> Finding | None:
        moved, off = point.value("teacher_canary"), point.value("teacher_off_uniform")  # infinite: no number was said
        values = known(teacher_canary=moved, teacher_off_uniform=off)
        if off is not None and off < self.rule.off_uniform:
            told = f"a teacher gives the canary's tokens -ln V, to within {off:.2g} nats"
            return Finding(f"{told} (teacher_constant.off_uniform: {self.rule.off_uniform:g})", values)
        if moved is None or moved <= self.rule.drift:
            return None
        names = [name.removeprefix(CANARY) for name in point.metrics if name.startswith(CANARY)]
        who = f"teacher {', '.join(names)}" if names else "a teacher"
        told = f"{who} gives the canary's tokens log-probabilities {moved:.3g} nats from those at the start"
        return Finding(f"{told} (teacher_constant.drift: {self.rule.drift:g})", values)

    def _told(self, point: Point) -> tuple[str, dict[str, float]]:
        share, entropy = point.finite("teacher_entropy_share"), point.finite("teacher_entropy")
        if share is not None and share >= self.rule.uniform:
            told = f"the teacher's entropy is {share:.1%} of ln V: it gives every token a log-probability near -ln V"
            return told, known(teacher_entropy_share=share, teacher_entropy=entropy)
        spread = point.finite("teacher_logprob_std", "teacher_entropy_std")
        level = point.finite("teacher_logprob", "teacher_entropy")
        if spread is not None and level is not None and spread <= self.rule.spread and abs(level) > self.rule.sure:
            told = f"the teacher says the same of every token: {level:.4g} with a deviation of {spread:.2g} nats"
            return f"{told} (teacher_constant.spread: {self.rule.spread:g})", {"level": level, "spread": spread}
        return "", {}

    def forget(self) -> None:
        self.streak = Streak()


@dataclass
class OneTeacher:
    rule: settings.OneTeacher
    streak: Streak = field(default_factory=Streak)
    whom: float | None = None

    def see(self, point: Point) -> Finding | None:
        share, whom = point.finite("teacher_share"), point.finite("teacher_most")
        if share is None:  # there is but one
            return None
        if whom != self.whom:
            self.streak = Streak()
        self.whom = whom
        if self.streak.add(share >= self.rule.share, point.step) < self.rule.steps:
            return None
        return Finding(
            f"{share:.1%} of the rows are of one teacher{'' if whom is None else f', number {whom:.0f}'}, "
            f"{since(self.streak)}",
            {"teacher_share": share},
        )

    def forget(self) -> None:
        self.streak = Streak()
