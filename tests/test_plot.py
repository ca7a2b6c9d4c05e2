"""tools/plot.py: what the curves are, read back from matplotlib's own objects."""

import math
import re
import matplotlib
import pytest
from scipy import stats
from test_compare import GOOD, SAME, side_of, write
from test_logs import LOGS, log_text, read_text
from records.tools import compare, load, logs, plot

LONG = (10.8258, 4.0, 3.9, 3.8, 3.7, 3.6, 3.5, 3.4, 3.3)

def long_side(label, folder, finals, **more):
    return side_of(label, write(folder, finals, before=LONG[:-1], then=3.4, **more))

def drawn(*sides, target=None):
    """The panels: seconds, tokens, and with pairs the difference."""
    comparison = compare.compare(*sides, target) if len(sides) > 1 else None
    return plot.draw(sides, comparison, target).axes

def bold_lines(panel):
    return [line for line in panel.get_lines() if line.get_linewidth() > 2]

def test_the_files(tmp_path):
    a = long_side("A", tmp_path / "a", GOOD, hyper={"name": "'a$_b'"})
    b = long_side("B", tmp_path / "b", SAME[:1], first_seed=9, hyper={"name": "'b\x1b'"})
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        for name in ("x.png", "x.svg"):
            plot.save(tmp_path / name, [a, b], None, 3.28)
    image = (tmp_path / "x.png").read_bytes()
    assert image.startswith(b"\x89PNG") and int.from_bytes(image[16:20]) == 9 * 144
    text = (tmp_path / "x.svg").read_text()
    for words in ("a$_b: 4 runs", r"b\x1b<", "Validation loss of a$_b against b", "target 3.28",
                  "training time (seconds)", "training tokens (millions)", "loss (nats a token)"):
        assert words in text, words
    shown = re.sub("<[^>]*>", "", text)  # without the tags, whose random names hold any digits
    assert "1e6" not in shown and "mean of" not in shown

def test_a_thin_line_a_run_and_a_thick_one_their_mean(tmp_path):
    side = long_side("A", tmp_path / "a", [3.2, 3.3, 3.7], ms=(80.0, 100.0, 120.0))
    left, right, below = drawn(side, side, target=3.28)
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1])
            for line in (bold_lines(left)[0], bold_lines(right)[0])]
    # Over time it is a run: the mean of the times would end where no run did.
    assert ends == [pytest.approx((112.5, 3.3)), pytest.approx((1.125, 3.4))]
    thin = {line.get_xdata()[-1] for line in left.get_lines() if line.get_linewidth() == 0.8}
    assert thin == {90.0, 112.5, 135.0}
    assert [{*line.get_ydata()} for line in bold_lines(below)] == [{0.0}]
    low, high = left.get_ylim()  # that of the later losses, though the whole run is drawn
    assert left.get_xlim()[0] <= 0 and low < 3.2 and 4.0 < high < 10.8
    (tmp_path / "a" / "longer.log").write_text(log_text((*LONG, 3.2, 3.1), seed=9))
    side = side_of("A", tmp_path / "a")
    for panel in drawn(side, side):  # steps differ: no mean
        assert [line.get_ydata()[-1] for line in bold_lines(panel)] == 2 * [3.3]

def test_the_difference_is_drawn_by_step_in_pairs(tmp_path):
    a = long_side("A", tmp_path / "a", [3.2, 3.3, 3.1])
    panel = drawn(a, long_side("B", tmp_path / "b", [3.3, 3.5, 3.4]))[2]
    (mean,) = bold_lines(panel)
    assert mean.get_ydata()[-1] == pytest.approx(-0.2) and mean.get_xdata()[-1] == 1125
    (band,) = panel.collections
    half = stats.t.ppf(0.995, 2) * 0.1 / math.sqrt(3)
    at_end = [y for x, y in band.get_paths()[0].vertices if x == 1125]
    assert min(at_end) == pytest.approx(-0.2 - half) and max(at_end) == pytest.approx(-0.2 + half)
    assert panel.get_ylim()[0] < -0.3 and panel.get_ylim()[1] > 0

def test_a_run_that_is_alive_and_one_without_tokens(tmp_path):
    (tmp_path / "x.log").write_text(log_text((10.8, 4.0, 3.5), total=1000))
    for panel, end in zip(drawn(side_of("A", tmp_path, None)), (25.0, 0.25)):
        (line,) = bold_lines(panel)
        assert list(line.get_ydata()) == [10.8, 4.0, 3.5] and line.get_xdata()[-1] == end
    run = logs.read_run(LOGS / "stopped_early.txt", "x")
    sides = [compare.Side(label, [run], 3.28) for label in "AB"]
    assert drawn(*sides)[1].get_xlabel() == "training step"
    with pytest.raises(load.UserError, match="hold no validation"):
        drawn(compare.Side("A", [read_text(tmp_path, log_text((math.nan,), total=9))], 3.28))
