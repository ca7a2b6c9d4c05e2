"""tools/page.py: a race's page has what compare.py prints, and a hostile log changes nothing."""

import html
from test_compare import run_main, side_of, write
from test_logs import log_text
from test_plot import LONG
from records.tools import compare, page

EVIL = ("</script><script>window.hacked = 1</script><img src=x onerror=window.hacked=1>"
        "\x1b[2J'\"&$body")

def page_of(folders, **more) -> str:
    sides = [side_of(label, folder, None) for label, folder in zip("AB", folders)]
    return page.page(sides, compare.compare(*sides, None), **more)

def test_it_has_all_that_is_printed(tmp_path, capsys):
    """And the picture, and above it what race.py wants to have said first."""
    folders = [tmp_path / "ours", tmp_path / "theirs"]
    for i, finals in enumerate(([3.2, 3.3, 3.1], [3.3, 3.5, 3.4])):
        write(folders[i], finals, hyper={"muon_lr": i})
    text = page_of(folders, notes=["ours is <not> honest"])
    printed = run_main(capsys, folders[0], "--vs", folders[1], "--target=0")[1]
    verdict, *rest = printed.split("Mean below 0")
    assert len(printed) > 1000 and html.escape(rest[-1].partition("\n\n")[2]) in text
    assert text.index("&lt;not&gt; honest</p>") < text.index('<p class="verdict undecided">')
    assert text.count("<svg") == 1 and text.count("</svg>") == 1

def test_a_hostile_log_changes_nothing(tmp_path):
    """In two folders of logs with hostile names, settings and source, with long lines."""
    folders = [tmp_path / "a<b>\x1b", tmp_path / "b%{x}"]
    for i, folder in enumerate(folders):
        folder.mkdir()
        for seed in (1, 2):
            long = "x" * 100_000 if seed > i else ""
            text = log_text((*LONG[:-1], 3.2 + seed * (i + 1) / 100), seed=f"{seed}{EVIL}",
                            hyper={"name": repr(EVIL + long), "muon_lr": f"{EVIL}{i}{long}"},
                            env={"gpus": EVIL + long, "host": f"{EVIL}{i}", "torch": EVIL},
                            source=f"def f{EVIL}():\n    '{EVIL}{i}{long}'\n")
            (folder / f"<img src=x onerror=window.hacked=1>{seed}.log").write_text(text)
    text = page_of(folders, alive=True)
    assert "refresh" in text and "refresh" not in page_of(folders)
    assert "\x1b" not in text and len(text) < 300_000 and "<script" not in text
    assert "<img" not in text and text.count("<footer>") == 1
