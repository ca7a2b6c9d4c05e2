"""The figures of records/method.md show what train_gpt.py does now, and so do their captions."""

import re
import subprocess
import sys
import pytest
from conftest import ROOT

FOLDER = ROOT / "records" / "method"
PAGE = (ROOT / "records" / "method.md").read_text(encoding="utf-8")
NAMES = re.findall(r"!\[[^\]]+\]\(method/(\w+)\.svg\)", PAGE)

def described(path) -> list[str]:
    return re.search("<dc:description>(.+)</dc:description>", path.read_text())[1].split("; ")

@pytest.mark.method
def test_committed_figures_and_their_captions_have_todays_numbers(tmp_path):
    """The program draws what the page shows."""
    subprocess.run([sys.executable, FOLDER / "figures.py", tmp_path], check=True)
    assert len(NAMES) > 4
    for folder in (tmp_path, FOLDER):
        assert {path.stem for path in folder.glob("*.svg")} == {*NAMES}
        assert all(2000 < path.stat().st_size < 60_000 for path in folder.glob("*.svg"))
    for name in NAMES:
        numbers = described(tmp_path / f"{name}.svg")
        assert described(FOLDER / f"{name}.svg") == numbers, "python records/method/figures.py"
        caption = PAGE.split(f"(method/{name}.svg)")[1].split("\n## ")[0]
        words = re.sub(r"\s+", " ", caption)
        assert all(re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d)", words)
                   for number in numbers), name
