"""tools/page.py: its figures are those of --json, hostile logs, and what it does in a browser."""

import html
import json
import re
import shutil
import pytest
from test_compare import run_main, side_of, write
from test_logs import log_text
from test_plot import LONG
from records.tools import compare, page, tables

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]

@pytest.fixture
def sides(tmp_path):
    for i, (name, finals) in enumerate((("ours", [3.2, 3.3, 3.1]), ("theirs", [3.3, 3.5, 3.4]))):
        write(tmp_path / name, finals, before=LONG[:-1], then=3.4, ms=(90.0, 100.0, 130.0),
              hyper={"name": f"'{name}'", "muon_lr": i}, source=f"def f():\n    return {i}\n")
    return [tmp_path / "ours", tmp_path / "theirs"]

def tables_of(text):
    found = {}
    for name, body in re.findall(r'(?s)<table id="(.*?)">.*?<tbody>(.*?)</tbody>', text):
        found[name] = [[html.unescape(cell) for cell in re.findall("<td[^>]*>(.*?)</td>", row)]
                       for row in body.strip().splitlines()]
    return found

def traces_of(text, name):
    start = re.search(rf'Plotly\.newPlot\(\s*"{name}",\s*', text).end()
    return json.JSONDecoder().raw_decode(text, start)[0]

def written(capsys, tmp_path, *arguments):
    path = tmp_path / "page.html"
    status, out, _ = run_main(capsys, *arguments, "--html", path, "--json")
    assert status == 0
    return path.read_text(), json.loads(out)

@pytest.mark.parametrize("level", [None, 0.5])
def test_its_figures_are_those_of_json(sides, tmp_path, capsys, level):
    more = ["--until_decided", level] if level else []
    text, found = written(capsys, tmp_path, sides[0], "--vs", sides[1], "--target", 3.35, *more)
    shown = tables_of(text)
    (comparison,) = found["comparisons"]
    loss = comparison["paired"]["loss"]
    low, high = loss["interval"]
    evidence = loss["p"] if level is None else min(1, 1 / loss["E"])
    assert shown["tests-A"][0] == ["val loss, 3 pairs", f"{loss['difference']:+.5f}",
                                   f"{low:.5f} .. {high:.5f} ({tables.percent(loss['level'])})",
                                   f"{evidence:.2g}", "3 of 3"]
    assert ["muon_lr", "1", "0"] in shown["settings"]
    assert html.escape(comparison["verdict"]) in text
    assert (low < 0 < high) == (comparison["decision"] == "undecided")
    curves = traces_of(text, "loss")
    for label, thin, bold, side in zip("AB", curves[::2], curves[1::2], found["sides"]):
        for row, run in zip(shown[f"runs-{label}"], side["runs"], strict=True):
            step = f"{run['reached'][0]:.0f}" if run["reached"] else "-"
            assert row[:7] == [run["name"], f"{run['loss']:.4f}", f"{run['seconds']:.2f} s",
                               f"{run['ms_per_step']:.2f}", str(run["steps"]), "1.125M", step]
        assert [row[2] for row in shown[f"spread-{label}"]] == [
            f"{side['loss']['mean']:.5f}", f"{side['seconds']['mean']:.3f} s"]
        expected = [point for run in side["runs"]
                    for point in [*((one[0], one[3]) for one in run["validations"]), (None, None)]]
        assert list(zip(thin["x"], thin["y"])) == expected
        assert bold["y"][-1] == pytest.approx(side["loss"]["mean"])
    band, pairs, mean = traces_of(text, "difference")
    assert mean["y"][-1] == pytest.approx(loss["difference"])
    at_end = sorted(y for x, y in zip(band["x"], band["y"]) if x == 1125)
    assert at_end == pytest.approx(loss["interval"])
    assert pairs["y"][9] == pytest.approx(3.2 - 3.3) and pairs["y"][10] is None

@pytest.mark.parametrize("more, words", [
    ({"first_seed": 7}, "No seed was run by both sides"),
    ({"every": 100}, "no two validations at the same steps"),
    ({"env": {"val_data": "other.bin 9 tokens aa"}}, "Losses do not compare: ours validates")])
def test_why_no_difference_is_drawn(sides, tmp_path, more, words):
    """Never that there are no pairs where the verdict is of pairs."""
    write(sides[1], [3.31, 3.52, 3.43], before=LONG[:-1], then=3.4, **more)
    both = [side_of("A", sides[0], None), side_of("B", sides[1], None)]
    found = compare.compare_all(both[:1], both[1], None)
    text = page.page(both, found, None)
    assert words in text and 'id="difference"' not in text
    assert ("No seed" in text) == (found[0]["paired"]["seeds"] == [])

EVIL = ("</script><script>window.hacked = 1</script><img src=x onerror=window.hacked=1>"
        "\x1b[2J'\"&$body")

@pytest.fixture
def hostile(tmp_path, capsys):
    """The page of two folders of logs with hostile names, settings and source, with long lines."""
    folders = [tmp_path / "a<b>\x1b", tmp_path / "b%{x}"]
    for i, folder in enumerate(folders):
        folder.mkdir()
        for seed in (1, 2):
            long = "x" * 2_000_000 if seed > i else ""
            text = log_text((*LONG[:-1], 3.2 + seed * (i + 1) / 100), seed=f"{seed}{EVIL}",
                            hyper={"name": repr(EVIL + long), "muon_lr": f"{EVIL}{i}{long}"},
                            env={"gpus": EVIL + long, "host": f"{EVIL}{i}", "torch": EVIL},
                            source=f"def f{EVIL}():\n    '{EVIL}{i}{long}'\n")
            (folder / f"<img src=x onerror=window.hacked=1>{seed}.log").write_text(text)
    return written(capsys, tmp_path, folders[0], "--vs", folders[1])[0]

def test_a_hostile_log_changes_nothing(hostile):
    body = hostile.replace(page.get_plotlyjs(), "")
    assert "\x1b" not in body and len(body) < 1_000_000
    scripts = re.findall(r"(?s)<script>.*?</script>", body)
    assert len(scripts) == 1 + 2 + 1  # Plotly, two figures, the frame's
    assert "<img" not in body and not any("window.hacked = 1<" in one for one in scripts)
    assert body.count("<footer>") == 1

@pytest.fixture(scope="module")
def chromium():
    path = shutil.which("chromium")
    if not path:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as program:
        browser = program.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()

@pytest.fixture
def tab(chromium):
    """A tab; afterwards there must have been no error, and no request but for files."""
    trouble = []
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    tab = context.new_page()
    for event in ("console", "pageerror", "dialog"):
        tab.on(event, lambda message: trouble.append(str(message)))
    tab.on("request", lambda request: request.url.startswith(("file:", "data:", "blob:"))
           or trouble.append(request.url))
    yield tab
    context.close()
    assert trouble == []

def test_it_switches_and_offers_no_upload(sides, tmp_path, capsys, tab):
    written(capsys, tmp_path, sides[0], "--vs", sides[1])
    tab.goto(f"file://{tmp_path}/page.html")
    offers = tab.locator(".modebar-btn").evaluate_all("all => all.map(one => one.dataset.title)")
    assert "Pan" in offers and not re.search("(?i)share|cloud|edit", " ".join(offers))
    for button, title, end in (("tokens", "training tokens (millions)", 1.125),
                               ("seconds", "training time (seconds)", 1.125 * 130),
                               ("steps", "training step", 1125)):
        tab.locator("#loss .menulayer").get_by_text(button, exact=True).click()
        tab.locator("#loss .xtitle").get_by_text(title).wait_for()
        shown = tab.evaluate("document.getElementById('loss')._fullLayout.xaxis.range[1]")
        assert shown >= end >= shown * 0.9

def test_it_fits_a_phone_and_a_laptop(sides, tmp_path, capsys, tab):
    """On a screen of 1,200 pixels no table is clipped, be its names ever so long."""
    for log in sorted(sides[0].glob("*.log")):
        log.rename(sides[0] / f"2026-11-25T07-28-11Z_{'my_record_' * 4}_{log.name}")
    written(capsys, tmp_path, sides[0], "--vs", sides[1], "--target", 3.35)
    tab.goto(f"file://{tmp_path}/page.html")
    for width in (1200, 400):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.evaluate("""Promise.all([...document.querySelectorAll(".js-plotly-plot")]
            .map(one => Plotly.Plots.resize(one))).then(() => {})""")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        clipped = tab.evaluate("""[...document.querySelectorAll(".table")]
            .filter(one => one.scrollWidth > one.clientWidth).map(one => one.firstChild.id)""")
        assert width < 1200 or clipped == []

def test_it_reloads_while_a_run_trains(tmp_path, tab):
    log = tmp_path / "x.log"
    log.write_text(log_text((10.8, 4.0), total=500))
    page.save(tmp_path / "page.html", [side_of("A", log)], [], None, alive=True)
    tab.clock.install()
    tab.goto(f"file://{tmp_path}/page.html")
    assert tab.locator("#alive").is_visible()
    log.write_text(log_text((10.8, 4.0, 3.5, 3.4, 3.3), total=500))
    page.save(tmp_path / "page.html", [side_of("A", log)], [], None)
    tab.clock.fast_forward(5000)  # after which it reloads
    tab.locator("#alive").wait_for(state="hidden")
    assert tab.locator("#runs-A tbody td:nth-child(2)").text_content() == "3.3000"
