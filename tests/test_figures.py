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

@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    subprocess.run([sys.executable, FOLDER / "figures.py", folder], check=True)
    return folder

@pytest.mark.method
def test_the_program_draws_what_the_page_shows(drawn):
    assert len(NAMES) > 4
    for folder in (drawn, FOLDER):
        assert {path.stem for path in folder.glob("*.svg")} == {*NAMES}
        assert all(2000 < path.stat().st_size < 60_000 for path in folder.glob("*.svg"))

@pytest.mark.method
@pytest.mark.parametrize("name", NAMES)
def test_committed_figures_and_their_captions_have_todays_numbers(drawn, name):
    numbers = described(drawn / f"{name}.svg")
    assert described(FOLDER / f"{name}.svg") == numbers, "python records/method/figures.py"
    caption = PAGE.split(f"(method/{name}.svg)")[1].split("\n## ")[0]
    words = re.sub(r"\s+", " ", caption)
    assert all(re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d)", words) for number in numbers)
