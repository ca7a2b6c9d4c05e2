"""Judge the logs of NanoGPT speedruns: what was changed, is it better, is it faster, how surely.

    ./run.sh compare records/*.log                       one setting: runs, spread, p-value
    ./run.sh compare new/ --vs base/ --plot new.png      two settings, a verdict, a picture
    ./run.sh compare new/ --vs base/ --statistics        new/statistics.md, for a submission

A log is this project's, or published by the speedrun since October 2024, or a captured console; it
may hold several runs. A folder stands for every .log and .txt below it. A resumed run is read with
the logs that it continues. Only finished runs with finite losses count, and none that was resumed
with another script or other settings, or whose first log is missing, as long as there are others;
what is left out is named. Losses on different validation text are not compared.

Runs of the same seeds are tested in pairs, beside Welch's test. If pairs were added until a
difference was decided, no p-value holds: --until_decided=0.01 judges by e-values, as ./run.sh race
does. An interval has the level of the decision, 99 % unless said, so it holds 0 where nothing is
decided.

Exit status: 0 all read, 1 some log was none or missing (the rest is still reported), 2 wrong usage,
or losses on different validation text. --json prints one object for programs, with the fields of
judge.py's Side and compare and logs.py's Run.
"""

import difflib
import hashlib
import json
import sys
import textwrap
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import judge, load, tables
from records.tools.load import between
from records.tools.judge import (ALPHA, TARGET, comparable_losses, comparable_times,
                                 test_that_speaks)
from records.tools.logs import interval, number, printable, read, short
from records.tools.tables import percent, plain, runs_of

WIDTH = 100
DIFF_LINES = 60  # of a diff of sources that is printed
RECORDS = Path(__file__).resolve().parents[1]

# ---- One side ------------------------------------------------------------------------------------

class Side(judge.Side):
    """A side, with what is said of it."""

    def __init__(self, label, runs, target):
        super().__init__(label, runs, target)
        self.name = name_of(runs)
        self.warnings = list(warnings_about(self))
        self.about_rule = rule_line(self.rule, target)

def warnings_about(side):
    label = side.label
    for one in side.runs:
        if one.changed or one.mixed:
            text = (f"run {one.name} of {label} was resumed with differences "
                    f"({'; '.join([*one.changed, *one.mixed])})")
            if judge.of_two_methods(one):
                text += ", kept, for there is no other" if one in side.used else ", left out"
            yield text
    if side.shared_seeds:
        yield f"runs of {label} share a seed: {', '.join(side.shared_seeds)}"
    if side.diverged:
        yield f"{runs_of(side.diverged)} of {label} had a loss that is not finite"
    if side.stopped:
        yield f"{runs_of(side.stopped)} of {label} stopped before a last loss"
    if side.mixed:
        yield f"runs of {label} differ from each other in: {', '.join(side.mixed)}"

def rule_line(rule, target):
    """What the speedrun's rule says of a side."""
    if target is None:
        return "no target: these runs have a vocabulary of their own (--target sets one)"
    return (f"speedrun's rule, a mean below {target:g} at p < {ALPHA} (one-sided t-test): "
            f"p = {number(rule['p'], '.2g')}, {'holds' if rule['holds'] else 'does not hold'}")

def name_of(runs):
    """What the runs are called: by their own name, else by their folder, else by the first."""
    names = {run.hyperparameters.get("name", "").strip("'\"") for run in runs}
    if len(names) == 1 and names != {""}:
        return short(names.pop(), 100)
    folders = {Path(run.path).resolve().parent for run in runs}
    if len(folders) == 1 and RECORDS not in folders:
        return folders.pop().name
    return runs[0].name

# ---- The verdict ---------------------------------------------------------------------------------

def compare(a, b, target, level=None):
    """What judge.compare finds, with a diff of the sources and the verdict in words."""
    found = judge.compare(a, b, level)
    found["source"] = source_diff(*[(each.used or each.runs)[0] for each in (b, a)])
    found["unequal"] = unequal(a, b)
    found["sentences"] = sentences_about(a, b, found, target)
    found["verdict"] = " ".join(found["sentences"])
    return found

def source_diff(old, new):
    """A unified diff of the sources of B and A; None where a log holds no source."""
    if not (old.source and new.source):
        return None
    texts = [run.source.splitlines() for run in (old, new)]
    return list(difflib.unified_diff(*texts, f"B {old.name}", f"A {new.name}", lineterm="", n=2))

def titles(sides):
    """What the sides are called: by their names, where these differ."""
    names = [side.name for side in sides]
    return names if len({*names}) == len(names) else [side.label for side in sides]

def unequal(a, b):
    """What else than the method may make a difference."""
    found = []
    for what in ("tokens", "steps", "parameters"):
        means = [[getattr(run, what) or 0 for run in side.used] or [0] for side in (a, b)]
        ours, theirs = map(fmean, means)
        if ours and theirs and ours != theirs:
            word = "more" if ours > theirs else "fewer"
            found.append(f"{plain(100 * abs(ours / theirs - 1))} % {word} {what}")
    if not comparable_losses(a, b):
        found.append("other validation data")
    if not comparable_times(a, b):
        found.append("other hardware, ranks or rules of the clock")
    return found

def sentences_about(a, b, comparison, target):
    """The verdict: a few sentences, never more than the runs support."""
    counts = [len(a.used), len(b.used)]
    both = {tuple(run.validations) for run in a.used} & {tuple(run.validations) for run in b.used}
    if both:  # the same losses and times, digit for digit
        return [f"Nothing is shown: {len(both)} of the runs stand on both sides."]
    if not comparison["no_effect"] and min(counts) < 2:
        return [f"Nothing is shown: {runs_of(counts[0], 'finished run')} of A against {counts[1]} "
                "of B, and spread takes at least 2 a side."]
    if a.shared_seeds + b.shared_seeds:
        return ["Nothing is shown: the runs of a side are not independent (see the warnings), so "
                "no p-value holds."]
    if comparable_losses(a, b) and test_that_speaks(comparison, "loss")["difference"] is None:
        return ["Nothing is shown: the sides have no seed in common, and an e-value takes pairs. "
                "Without --until_decided, all runs are compared."]
    sentences = [about_loss(a, b, comparison), about_steps(a, b, comparison),
                 about_time(a, b, comparison), about_later(a, b, comparison)]
    if comparison["unequal"]:
        sentences.insert(0, f"Unequal: {titles([a, b])[0]} has {', '.join(comparison['unequal'])}.")
    if target is not None:
        held = [f"{name} {'yes' if side.rule['holds'] else 'not shown'}"
                for name, side in zip(titles([a, b]), (a, b))]
        sentences.append(f"Mean below {target:g} at p < {ALPHA}: {', '.join(held)}.")
    if test_that_speaks(comparison, "loss")["E"] is not None:
        sentences.append("E assumes that differences of pairs are spread evenly to both sides.")
    sentences += [f"But mind the warnings about {side.label}." for side in (a, b) if side.warnings]
    return list(filter(None, sentences))

def other_validation(a, b):
    """Why losses do not compare, with the validation data of both sides."""
    data = [{row for one in side.used for row in one.val_data} for side in (a, b)]
    counts = [{one.validated_on[:2] for one in side.used} for side in (a, b)]
    texts = []
    for name, own, other, sizes in zip(titles([a, b]), data, data[::-1], counts):
        shards = ", ".join(sorted(own - other or own)) or "data that the log does not name"
        texts.append(f"{name} validates on {short(shards, 300)}")
        if counts[0] != counts[1]:
            texts[-1] += ", " + " | ".join(
                f"{tokens or 'unknown'} tokens of a vocabulary of {vocabulary or 'unknown'}"
                for tokens, vocabulary in sorted(sizes, key=str))
    return f"Losses do not compare: {', but '.join(texts)}."

def about_loss(a, b, comparison):
    count = comparison["no_effect"]
    pairs = len(comparison["paired"]["seeds"])
    if not comparable_losses(a, b):
        return other_validation(a, b)
    if count:
        return (f"The change had no effect on the losses: with the same seed both sides log the "
                f"same losses at every step ({count} losses in {runs_of(pairs, 'pair')}).")
    names = titles([a, b])
    test = test_that_speaks(comparison, "loss")
    size = f"{names[0]} - {names[1]} = {test['difference']:+.4f} nats a token"
    if test["interval"]:
        size += f", {percent(test['level'])} interval {interval(test['interval'], '+.4f')}"
    text = claim("loss", names, test, size, ("better", "worse"), comparison["level"])
    if comparison["speaks"] == "welch":
        text += f" by Welch's t-test of {len(a.used)} runs against {len(b.used)}"
    return f"{text}."

def about_steps(a, b, comparison):
    """What the difference in nats, and its interval, are in steps."""
    found = comparison["paired"]["steps"]
    nats = comparison["paired"]["loss"]["difference"]
    shown = comparison["speaks"] == "paired" and comparison["decision"] != "no difference"
    if not (shown and nats) or len({run.steps for run in a.used + b.used}) > 1:
        return ""
    if found["difference"] is None:
        return ("How many steps or seconds that is cannot be known: the curve of "
                f"{titles([a, b])[1]} has no such loss, or no validation near it (within a tenth "
                "of the run at its end, within a quarter before).")
    earlier = found["difference"] < 0
    share = (-100 if earlier else 100) / b.used[0].steps
    between = ""
    if found["interval"]:
        ends = [plain(share * steps, 2) for steps in sorted(found["interval"], reverse=earlier)]
        level = percent(comparison["paired"]["loss"]["level"])
        between = f" ({level} interval: {ends[0]} to {ends[1]} %)"
    return (f"By the slope of its curve, {titles([a, b])[1]} would need "
            f"{plain(abs(found['difference']))} {'more' if earlier else 'fewer'} steps for the "
            f"same loss, {plain(share * found['difference'], 2)} % of the run{between}.")

def about_time(a, b, comparison):
    if not comparable_times(a, b):
        return ("Times do not compare, the hardware, the ranks or the rules of the clock differ, "
                "or a run was resumed with differences.")
    wrong = [run for run in a.used + b.used if judge.clock_is_wrong(run)]
    if wrong:
        said, passed, _ = wrong[0].clock
        return (f"Times do not count: the log of {wrong[0].name} says {plain(said)} s of training, "
                f"and {plain(passed)} s passed by the race's clock, validation and saving apart."
                + " A race does not keep such a copy." * (wrong[0] in a.used))
    test = test_that_speaks(comparison, "seconds")
    if test["difference"] is None:
        return None
    size = f"{plain(test['difference'], 3, '+')} s, {share_of_time(test, b)}"
    text = claim("time", titles([a, b]), test, size, ("faster", "slower"), comparison["level"])
    return f"{text} on {a.used[0].hardware or 'hardware that the logs do not name'}."

def share_of_time(test, b):
    return f"{100 * test['difference'] / max(b.seconds['mean'], 1e-9):+.1f} %"

def about_later(a, b, comparison):
    """How much longer A takes to the final loss of B, and whether that is decided."""
    test = test_that_speaks(comparison, "later")
    if comparison["decision"] == "no difference" or judge.p_value(test) is None:
        return ""
    ours, theirs = titles([a, b])
    longer = test["difference"] > 0
    size = share_of_time(test, b)
    if test["interval"]:
        size += f", {percent(test['level'])} interval {interval(test['interval'], '+.3g')} s"
    end = "Which of them is faster to that loss is not decided, so the loss decides."
    if judge.is_sure(test, comparison["level"]):
        end = f"So {ours} is {'slower' if longer else 'faster'} to that loss"
        end += ", and a race does not keep it." if longer else "."
    return (f"To the final loss of {theirs}, {ours} takes {plain(abs(test['difference']))} s "
            f"{'more' if longer else 'less'} ({size}, {strength(test)}). {end}")

def claim(what, names, test, size, words, level=ALPHA):
    """One sentence about a difference A - B, as strong as its p- or e-value and no stronger."""
    if judge.p_value(test) is None:
        return f"No difference in {what} can be tested, the runs do not spread"
    than = f"{words[test['difference'] > 0]} than {names[1]}"
    text = f"No difference in {what} is shown"
    if judge.is_sure(test, 0.05):
        text = f"{names[0]} may be {than}, not surely"
    if judge.is_sure(test, level):
        text = f"{names[0]} is {than}"
    return f"{text} ({size}, {strength(test)})"

def strength(test):
    """The p- or e-value in words, and the signs."""
    text = f"p = {test['p']:.2g}" if test["E"] is None else f"E = {plain(test['E'])}"
    return text + (f", lower in {test['lower']} of {runs_of(test['n'], 'pair')}"
                   if "lower" in test else "")

# ---- Text ----------------------------------------------------------------------------------------

def say(text="", file=None):
    print(printable(text), file=file)

def say_wrapped(text, indent="  "):
    together = printable(text).replace(" %", "\0%")  # no line begins with a percent sign
    say(textwrap.fill(together, WIDTH, subsequent_indent=indent).replace("\0", " "))

def print_side(side):
    say_wrapped(tables.title_of(side))
    tables.print_table(tables.of_runs(side))
    say()
    tables.print_table(tables.of_spread(side))
    for line in [side.about_rule, *(f"warning: {text}" for text in side.warnings)]:
        say_wrapped(line)
    say()

def print_comparison(a, b, comparison):
    tables.print_table(tables.of_tests(a, b, comparison))
    say()
    for kind in ("hyperparameters", "environment"):
        rows = comparison[kind]
        say(f"{kind}: {'B -> A' if rows else 'no difference in the logs'}")
        for key, before, after in rows:
            say_wrapped(f"  {key}: {' | '.join(before)} -> {' | '.join(after)}", " " * 6)
        say()
    say("source, B -> A:")
    diff = ["missing in a log, no diff"] if comparison["source"] is None else comparison["source"]
    say("\n".join(diff[:DIFF_LINES] or ["the same"]))
    if len(diff) > DIFF_LINES:
        say(f"... and {len(diff) - DIFF_LINES} more lines, which --json has")
    say()

def as_json(thing):
    """The fields of a Side or a Run, for json.dumps."""
    if isinstance(thing, Side):
        return vars(thing) | {"used": [one.name for one in thing.used]}
    digest = hashlib.sha256(thing.source.encode()).hexdigest() if thing.source else None
    return {key: value for key, value in vars(thing).items() if key != "lines"} | {"source": digest}

# ---- The command ---------------------------------------------------------------------------------

def parse(arguments):
    parser = load.ArgumentParser(description=__doc__, prog="./run.sh compare")
    parser.add_argument("logs", nargs="+", metavar="A", help="logs, or folders of logs")
    parser.add_argument("--vs", nargs="+", metavar="B", default=[], action="extend",
                        help="the baseline's")
    parser.add_argument("--target", type=between(0, kind=float),
                        help="validation loss to reach (3.28 where the vocabulary is GPT-2's)")
    parser.add_argument("--until_decided", type=between(1e-9, 0.5, float), metavar="LEVEL",
                        help="by e-values")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a .png or .svg")
    parser.add_argument("--statistics", action="store_true", help="write statistics.md beside A")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options = parser.parse_args(arguments)
    if options.plot and not options.plot.endswith((".png", ".svg")):
        parser.error("--plot takes a .png or an .svg")
    return options

def read_sides(options):
    """The sides, their comparison, the target, and a line for each input that is no log."""
    sides = []
    unread = []
    for paths in filter(None, (options.logs, options.vs)):
        runs, lines = read(paths)
        if not runs:
            raise load.UserError(f"no run in {', '.join(map(str, paths))} ({'; '.join(lines)})")
        sides.append(runs)
        unread += lines
    target = options.target
    vocabularies = {run.hyperparameters.get("vocab_size") for runs in sides for run in runs}
    if target is None and vocabularies <= {None, "50257", "50304"}:  # GPT-2's
        target = TARGET
    return *judged(sides, target, options.until_decided), target, unread

def judged(sides, target, level=None):
    """The runs of A, and those of B if there is one, as sides; their comparison or None."""
    sides = [Side(label, runs, target) for label, runs in zip("AB", sides)]
    return sides, compare(*sides, target, level) if len(sides) > 1 else None

def report(sides, comparison):
    """Print everything about the sides."""
    print_verdict(comparison)
    for side in sides:
        print_side(side)
    if comparison:
        print_comparison(*sides, comparison)
    print_verdict(comparison)  # again, where the eye is

def print_verdict(comparison):
    if comparison:
        first, *others = comparison["sentences"]
        for text in (f"verdict: {first}", *others):
            say_wrapped(text)
        say()

def main(arguments=None):
    """Print what is asked for; returns the exit status."""
    options = parse(arguments)
    sides, comparison, target, unread = read_sides(options)
    for line in unread:
        say(line, sys.stderr)
    if options.plot:
        from records.tools import plot  # which takes a second to import
        plot.save(options.plot, sides, comparison, target)
    if options.statistics:
        from records.tools import submission
        path = submission.write(sides, comparison, target)
        if submission.until_decided(sides):
            say(f"warning: {submission.PEEKED}", sys.stderr)
        say(f"{path} is written", sys.stderr)
    apart = comparison and not comparable_losses(*sides)
    if options.json:
        found = {"version": 13, "target": target, "sides": sides, "unread": unread,
                 "comparisons": [comparison] if comparison else []}
        print(json.dumps(found, indent=1, default=as_json, allow_nan=False))
    elif not apart:
        report(sides, comparison)
    if apart:
        say(f"error: {other_validation(*sides)}", sys.stderr)
    return 2 if apart else 1 if unread else 0

if __name__ == "__main__":
    sys.exit(load.run(main))
