"""docs/guards.md is what the matrix of faults found. `OPDCTL_RENEW_DOCS=1` writes it."""

import os
import re
from pathlib import Path

import pytest
from guards.page import page

pytestmark = pytest.mark.xdist_group("guards")
PAGE = Path(__file__).resolve().parents[2] / "docs/guards.md"


def plain(text: str) -> str:
    """Without the decimals: sums in another order round otherwise."""
    return re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", text)


def test_the_page_tells_what_the_matrix_finds():
    written = page()
    if os.environ.get("OPDCTL_RENEW_DOCS"):
        PAGE.write_text(written)
    assert plain(PAGE.read_text()) == plain(written)
