"""What a race found: the rows of verdict.json, verdict.txt, picture, page and patches."""

import ast
import contextlib
import difflib
import hashlib
import io
import json
import shlex
from dataclasses import dataclass
from operator import attrgetter
from statistics import mean

from data.common import write_whole
from records.tools import compare, judge, kept, logs, page
from records.tools.tables import plain, runs_of
from records.tools.trial import Entry

REPORTS = ["evaluate", "load_validation", "read_tokens", "train_batches", "StepClock", "RunLog",
           "main"]

def in_words(pairs, row: dict, options) -> str:
    """How a candidate stands after these pairs, in one wording for the way and the end."""
    gaps = [ours.loss - theirs.loss for ours, theirs in pairs]
    gap = mean(gaps)
    agree = sum(one * gap > 0 for one in gaps)
    share = "all" if agree == len(gaps) else f"{agree} of"
    text = (f"{row['decision']} after {runs_of(len(gaps), 'pair')}: "
            f"{'lower' if gap < 0 else 'higher'} by {abs(gap):.4f} in {share} {len(gaps)}, "
            f"E = {plain(row['E'], 2)} of {plain(1 / options.level, 2)}")
    if row["decision"] == "no difference":
        text += "; `./run.sh same` tells whether its mathematics is the same"
    if row["decision"] == "undecided" and len(gaps) == options.most:
        text += f"; the same command with `--most={2 * options.most}` goes on"
    return text

@dataclass(frozen=True)
class Outcome:
    row: dict  # of verdict.json
    sides: list  # the candidate's and the baseline's, as compare.py has them, if there is a pair
    comparison: dict  # of them
    notes: list[str]  # what is wrong with scripts

def pairs_of(one: Entry, baseline: Entry) -> list[tuple]:
    """The pairs (its run, the baseline's) of a candidate."""
    return [(run, baseline.runs[seed]) for seed, run in one.runs.items() if seed in baseline.runs]

def outcome_of(race) -> Outcome:
    """What its pairs show, by the losses of their exams."""
    one, baseline = race.candidate, race.baseline
    sides, found = [], NO_PAIR
    if pairs := pairs_of(one, baseline):
        runs = [[*side] for side in zip(*pairs)]
        runs[1].sort(key=attrgetter("path"))
        sides, found = compare.judged(runs, None, race.options.level)
    others = kept.of_others(baseline.runs, one)
    notes = [f"kept runs of {baseline.name}: {len(others)} of {len(baseline.runs)}, made by "
             f"{', '.join(sorted({*map(kept.maker, others)}))}"] * bool(others)
    notes += [each.problem or each.dishonest for each in (one, baseline)]
    ours, theirs = (untimed_share(each.runs.values()) for each in (one, baseline))
    if ours > 1.5 * theirs + 0.02:
        notes.append(f"while its clock stands, {one.name} runs for {ours:.0%} of the time that it "
                     f"counts, {baseline.name} for {theirs:.0%}: see what it does then")
    if sides and (names := touched(one.text, baseline.text)):
        notes.append(f"{one.name} changes {', '.join(names)}: look there first")
    row = row_of(one, baseline, found, *[side.used for side in sides] or ([], []))
    return Outcome(row, sides, found, [logs.printable(note) for note in notes if note])

# What is found of a candidate without a pair.
NO_PAIR = {"decision": "undecided", "verdict": "no pair", "slower": False,
           "paired": {"loss": {}, "steps": {}, "later": {}}}

def row_of(one: Entry, baseline: Entry, found: dict, ours: list, theirs: list) -> dict:
    """An object of verdict.json, of what was found by these runs of the candidate and others."""
    test = found["paired"]["loss"]
    values = {key: test.get(key) for key in ("difference", "interval", "E", "p")}
    values["adjusted"] = values["E"] and min(1, 1 / values["E"])
    for prefix, runs in (("", ours), ("baseline_", theirs)):
        for key in ("seconds", "tokens", "parameters"):
            known = [getattr(run, key) for run in runs]
            values[prefix + key] = mean(known) if known and None not in known else None
    for what, key in (("steps", "steps"), ("seconds", "later")):
        values[f"{what}_later"] = found["paired"][key].get("difference")
        values[f"{what}_interval"] = found["paired"][key].get("interval")
    spent = sum(sum(run.clock[1:]) if run.clock else run.seconds for run in one.runs.values())
    spent += sum(exam.get("seconds", 0.0) for exam in one.exams.values())
    values |= {"hours": round(spent / 3600, 5), "copy": one.digest, "baseline": baseline.digest,
               "note": one.note}
    decision, why = found["decision"], found["verdict"]
    if decision == "undecided" and one.standing:
        why = f"{one.name}: {one.standing}"
    if one.problem:
        decision = "dishonest" if one.dishonest else "broken"
    equal = values["tokens"] == values["baseline_tokens"]
    in_time = not found["slower"] and not any(map(judge.clock_is_wrong, ours))
    patch = patch_of(one, baseline)
    return {"candidate": one.name, "script": one.script, "decision": decision,
            "keep": decision == "better" and not one.dishonest and equal and in_time,
            "honest": not one.dishonest, "pairs": len(pairs_of(one, baseline)),
            "why": logs.printable(one.problem or one.dishonest or why), "slower": found["slower"],
            "baseline_steps": theirs[0].steps if theirs else None,
            "patch": hashlib.sha256(patch.encode()).hexdigest(), **values}

def patch_of(entry: Entry, baseline: Entry) -> str:
    """What was changed: a diff, after the flags."""
    texts = [one.text.splitlines(True) for one in (baseline, entry)]
    diff = difflib.unified_diff(*texts, baseline.script, entry.script)
    own = [flag for flag in entry.flags if flag not in baseline.flags]
    text = "".join([f"flags: {shlex.join(own)}\n" * bool(own), *diff])
    return text.encode("utf-8", "backslashreplace").decode()  # a file's name need not be UTF-8

def untimed_share(runs) -> float:
    """How long the clocks of runs stood after the first validation, as a share of the time that
    they counted."""
    shares = [run.clock[2] / run.clock[1] for run in runs if run.clock and run.clock[1]]
    return mean(shares) if shares else 0.0

def touched(text: str, other: str) -> list[str]:
    """Which of the functions that read, time or report differ between two scripts. Whoever reads a
    patch should look there first."""
    ours, theirs = ({node.name: ast.dump(node) for node in ast.parse(script).body
                     if getattr(node, "name", "") in REPORTS} for script in (text, other))
    return [name for name in REPORTS if ours.get(name) != theirs.get(name)]

def write_page(race, found: Outcome, alive: bool):
    """race.html, from the first pair on."""
    if found.sides:
        write_whole(race.folder / "race.html", page.page(
            found.sides, found.comparison, found.notes, alive))

def texts_of(race, found: Outcome) -> dict[str, str]:
    """The files of the verdict, {name: text}."""
    texts = {"verdict.json": json.dumps([found.row], indent=1),
             f"{race.candidate.name}.patch": patch_of(race.candidate, race.baseline)}
    if found.sides:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            compare.report(found.sides, found.comparison)
        texts["verdict.txt"] = "".join(f"{note}\n" for note in found.notes) + out.getvalue()
    return texts
