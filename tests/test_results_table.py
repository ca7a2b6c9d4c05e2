"""records/results_table.py: the table of results in records/README.md."""

import shutil
import subprocess

import pytest
from test_compare import GOOD, SAME, write
from test_logs import log_text

from records import results_table


@pytest.fixture
def checkout(tmp_path):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "records").mkdir()
    readme = "# Records\n\n{}\n{}\nthe end\n".format(*results_table.MARKERS)
    (tmp_path / "records" / "README.md").write_text(readme)
    return tmp_path / "records"


def track(checkout, *folders):
    subprocess.run(["git", "-C", str(checkout), "add", "-f", *folders], check=True)


def test_only_tracked_logs_are_records(checkout):
    readme = checkout / "README.md"
    write(checkout / "mine", GOOD)  # a user's own runs
    write(checkout / "speedrun", SAME)
    (checkout / "speedrun" / "stopped.log").write_text(log_text((10.8, 4.5), seed=50, total=250))
    track(checkout, "speedrun")
    results_table.update(checkout)
    text = readme.read_text()
    assert ("| [speedrun](speedrun/) | 4 of 5 | 3.2778 (0.0005) | 25.0 s (0.0) | 250 | "
            "250k | - |\n") in text
    assert text.startswith("# Records\n") and text.endswith("the end\n") and "mine" not in text
    results_table.update(checkout)
    assert readme.read_text() == text


def test_what_is_written_by_hand_stays_in_the_table(checkout):
    readme = checkout / "README.md"
    for name in ("one", "two"):
        write(checkout / name, SAME)
    track(checkout, "one", "two")
    results_table.update(checkout)
    said = "Is one | better than `two`? No: 3.2778 | 3.2778."
    rows = readme.read_text().splitlines()
    written = [row.removesuffix("- |") + f"{said} |" if row.startswith("| [one]") else row
               for row in rows]
    assert written != rows
    readme.write_text("\n".join(written) + "\n")
    write(checkout / "one", GOOD, hyper={"muon_lr": 1}, ms=(50.0,))
    write(checkout / "three", GOOD)
    track(checkout, "three")
    results_table.update(checkout)
    rows = {row.split("](")[0]: row for row in readme.read_text().splitlines()}
    assert rows["| [one"].endswith(f"| 12.5 s (0.0) | 250 | 250k | {said} |")
    assert rows["| [two"].endswith("| 250k | - |") and rows["| [three"].endswith("| 250k | - |")
