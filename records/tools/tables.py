"""The tables that compare.py prints: rows of text, the first of them the header."""

from records.tools import judge
from records.tools.logs import interval, number, printable

TERMINAL = 80  # columns, into which tables fit
MEASURES = (("val loss", "loss", ".5f", ""), ("time", "seconds", ".3f", " s"))

def tokens_text(count):
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count is not None and count >= size:
            return f"{count / size:.4g}{unit}"
    return number(count, "d")

def plain(value, digits=3, sign=""):
    """Rounded to so many digits, without an exponent for what is large."""
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign},.0f}" if "e+" in text else text

def percent(level):
    return f"{100 * (1 - level):.4g} %"

def runs_of(count, what="run"):
    return f"{count} {what}{'s' * (count != 1)}"

def print_table(rows):
    """Rows of text, the first of them the header; the first column stands to the left. Columns that
    hold nothing are left out, and those that do not fit a terminal come below."""
    first, *columns = zip(*[map(printable, row) for row in rows])
    columns = [column for column in columns if {*column[1:]} != {"-"}]
    left = max(map(len, first))
    lines = names = [text.ljust(left) for text in first]
    for column in columns:
        width = 2 + max(map(len, column))
        if lines is not names and len(lines[0]) + width > TERMINAL:
            print("\n".join(lines))
            lines = names
        lines = [line + text.rjust(width) for line, text in zip(lines, column)]
    print("\n".join(lines))

def title_of(side):
    """A side, and what it ran on."""
    text = f"{side.label}: {side.name}, {runs_of(len(side.runs))}"
    for what in ("hardware", "ranks", "torch"):
        values = {getattr(run, what) or "-" for run in side.runs}
        if values != {"-"}:
            text += f", {what} {' | '.join(sorted(values))}"
    return text

def of_runs(side):
    yield ["run", "val loss", "time", "ms/step", "steps", "tokens"]
    for run in side.runs:
        of = "" if run.finished else f"/{run.total}"
        yield [run.name, number(run.loss, ".4f"), number(run.seconds, ".2f", " s"),
               number(run.ms_per_step, ".2f"), f"{run.steps}{of}", tokens_text(run.tokens)]

def of_spread(side):
    yield ["over the runs", "n", "mean", "SD", "95 % interval of the mean"]
    for what, key, form, unit in MEASURES:
        found = getattr(side, key)
        yield [what, str(found["n"]), number(found["mean"], form, unit),
               number(found["sd"], form, unit), interval(found["interval"], form)]

def of_tests(side, baseline, comparison):
    yield ["at the end", f"{side.label} - {baseline.label}", "interval", "p or 1 / E", "lower in"]
    pairs = len(comparison["paired"]["seeds"])
    for what, key, form, unit in MEASURES:
        paired = comparison["paired"][key]
        tests = [(f"{pairs} pairs", paired)] * (pairs > 1)
        tests += [("Welch", comparison[key])] * (paired["E"] is None)
        for kind, test in tests:
            signs = f"{test['lower']} of {pairs}" if test.get("n") else "-"
            between = interval(test["interval"], form)
            between += f" ({percent(test['level'])})" if test["interval"] else ""
            yield [f"{what}, {kind}", number(test["difference"], f"+{form}", unit), between,
                   number(judge.p_value(test), ".2g"), signs]
