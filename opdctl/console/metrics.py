"""Which metrics of a stage are worth a glance, and how numbers are written."""

from collections.abc import Mapping

# kind -> (name in the events, what the display calls it), the telling one first; absent ones are left out
KEY_METRICS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sft": (("loss", "loss"),),
    "rlvr": (("reward", "reward"), ("length", "len"), ("truncated", "cut")),
    "opd": (("reverse_kl", "rkl"), ("accuracy", "acc"), ("length", "len")),
    "eval": (("accuracy", "acc"), ("within_budget", "within"), ("length", "len")),
    "merge": (("models", "models"),),
    "sample": (("accepted", "accepted"), ("kept", "kept"), ("length", "len")),
    "select": (("score", "score"),),
}
# kind -> what its steps are called; else steps
UNITS = {"eval": "models", "merge": "models", "sample": "prompts", "select": "models"}
THROUGHPUT = "tokens_per_s"


def key_metrics(kind: str, metrics: Mapping[str, float], limit: int = 2) -> str:
    """`reward 0.83 len 6.1`: at most `limit` metrics of those the kind is judged by."""
    known = [f"{label} {number(metrics[name])}" for name, label in KEY_METRICS.get(kind, ()) if name in metrics]
    return " ".join(known[:limit])


def number(value: float) -> str:
    """Three significant digits, in few characters: 0.0123, 6.12, 143, 21k."""
    size = abs(value)
    if size >= 1e6 or (0 < size < 1e-3):
        return f"{value:.1e}"
    if size >= 10_000:
        return f"{value / 1000:.0f}k"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1}f}"


def amount(value: float) -> str:
    """As `number`, but whole where it is whole or 100 and more, and in millions: 36, 0.358, 2,700, 21k, 1.04M."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:,.3g}M"
    return f"{value:,.0f}" if size < 10_000 and (value == round(value) or size >= 100) else number(value)


def throughput(metrics: Mapping[str, float]) -> str:
    """`21k/s`: tokens a second, or nothing."""
    rate = metrics.get(THROUGHPUT)
    return "" if rate is None else f"{rate / 1000:.1f}k/s" if rate >= 1000 else f"{rate:.0f}/s"


def clock(seconds: float) -> str:
    """`0:07`, `12:40`, `3:05:00`."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """`0.8 s`, `32 s`, `12 min 40 s`, `3 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
