"""Recomputes what the folder of a race claims, from the logs in it:

    ./run.sh verify records/race_my_record

It prints a line for each thing that does not hold (exit status 3), or one line if all holds (0):

- Logs, the race's clocks of them and exams.json have the SHA-256 that race.json says. Each log is
  whole, and each run has finished in one go and has an exam (since version 4). An interrupted run
  may have been stopped for a bad loss, so the finished run of its seed must have begun with the
  same losses, except on a GPU, where two runs differ.
- A side has one log of each seed of its pairs, all with the same settings, and with the script, the
  flags and the ranks that race.json says. What differs between sides is named by the patch.
- All runs have the same data, and those of a pair the same hardware, torch, ranks and threads.
- NAME.patch, NAME.py, verdict.txt and verdict.json (to nine digits, because CPUs round differently)
  are what a race makes of these logs.

It cannot find a forger who changes all files consistently, and believes what the folder says of
exams, broken candidates and options. So give the copy to ./run.sh honest, and race it too.
"""

import contextlib
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import load, logs, race, trial, verdict

CHOSEN = {"seed", *logs.NO_SETTINGS}  # by the race, for each run
FLAG = re.compile(r" --(?:seed|name|save_every|val_loss_every|curve)\b\S*| --records=.*?(?= --|$)")
MACHINE = {"cpu", "gpus", "torch", "ranks", "threads", "gpu driver_version", "gpu power.limit [W]"}

def unlike(runs: list, what: str, value_of, expected=None):
    """A line for each value that is not the expected one, or else not that of most runs."""
    values = Counter(map(value_of, runs))
    expected = expected or max(values, key=values.get, default=None)
    for value in values.keys() - {expected}:
        paths = [run.path for run in runs if value_of(run) == value]
        yield f"{paths[0]}: {what} {value}, expected {expected}; so in {len(paths)} logs"

def flags_in(words: str) -> str:
    """The flags among words, without what the race chooses for each run."""
    return " ".join(sorted(re.sub("^--preset=", "", word) for word in FLAG.sub("", words).split()))

def of_side(told: dict, name: str, runs: list, pairs: int):
    """What does not hold about the runs of a side."""
    yield from unlike(runs, "the SHA-256 of its script is", lambda run: trial.hash_of(run.source),
                      told[f"{name}.sha256"])
    flags = " ".join(["", *told[f"{name}.flags"], *(told.get("text") or {"flags": []})["flags"]])
    if " --text" not in flags:  # which the launcher replaces
        yield from unlike(runs, "its flags are", lambda run: flags_in(
            run.environment.get("command", "").partition(".py")[2]), flags_in(flags))
    for key in sorted({key for run in runs for key in run.hyperparameters} - CHOSEN):
        yield from unlike(runs, f"{key} is", lambda run: run.hyperparameters.get(key))
    ended = {run.seed: run for run in runs if run.finished}
    held = Counter(run.seed for run in runs if run.finished)
    raced = Counter(str(told["first_seed"] + pair) for pair in range(pairs))
    for seed in (raced - held) | (held - raced):
        yield f"{name}: {held[seed]} logs have seed {seed}, expected {raced[seed]}"
    for run in runs:
        again = ended.get(run.seed, run)
        losses, own = ([(line.step, line.kind, line.loss) for line in each.lines[:len(run.lines)]]
                       for each in (again, run))
        interrupted = again is not run and ("gpus" in run.environment or losses == own)
        if run.resumed() or run.diverged or not (run.finished or interrupted):
            yield f"{run.path}: its run has not finished in one go"

def of_pairs(one: trial.Entry, baseline: trial.Entry):
    """What differs within the pairs, apart from what the patch names."""
    changed = re.findall(r"(?m)^(?:[+-]|flags:)(.*)", verdict.patch_of(one, baseline))
    named = CHOSEN.union(re.findall(r"\w+", " ".join(changed)))
    for pair in [(run, baseline.runs.get(seed, run)) for seed, run in one.runs.items()]:
        keys = {key for run in pair for key in run.hyperparameters} - named
        for key in sorted(keys.union(*[MACHINE & run.environment.keys() for run in pair])):
            yield from unlike(pair, f"unlike its pair's, {key} is",
                              lambda run: (run.environment | run.hyperparameters).get(key))

def of_files(plan: race.Race):
    """Which files are not what the race would write."""
    texts = verdict.texts_of(plan, verdict.outcome_of(plan))
    kept = {plan.folder / f"{one.name}.py": one.text for one in plan.racers}
    texts |= {path.name: text for path, text in kept.items() if path.exists()}
    written = {name: (plan.folder / name).read_text(encoding="utf-8") for name in texts}
    (told,), (found,) = (json.loads(
        each.pop("verdict.json"), parse_float=lambda x: f"{float(x):.9g}")
        for each in (written, texts))
    keys = told | (found if "copy" in told else {})  # older ones have fewer
    for key in keys:
        if told.get(key) != found.get(key):
            yield f"verdict.json: {key} is {told.get(key)}, recomputed {found.get(key)}"
    for name in texts:
        if written[name] != texts[name]:
            yield f"{name}: is not what the race makes of the logs"

def problems(plan: race.Race, told: dict, row: dict, sides: dict):
    """A line for each thing that does not hold."""
    for path in sorted({path for path, _ in race.sums(plan.folder).items() ^ told["logs"].items()}):
        yield f"{path}: this file is missing, or has not the SHA-256 that race.json notes"
    every = [run for runs, _ in sides.values() for run in runs]
    yield from unlike(every, "its training shards are", lambda run: str(run.trained_on()))
    yield from unlike(every, "its validation data are", lambda run: run.validated_on)
    yield from unlike(every, "its ranks are", lambda run: run.ranks, told["NPROC"])
    for one in plan.racers:
        runs, unread = sides[one.name]
        yield from [*unread, *of_side(told, one.name, runs, row["pairs"])]
        if told["version"] > 3:
            for seed in one.runs.keys() - one.exams.keys():
                yield f"exams.json: has no exam of {one.name}, seed {seed}"
    yield from of_pairs(plan.candidate, plan.baseline)
    yield from of_files(plan)

def main(arguments=None) -> int:
    parser = load.ArgumentParser(description=__doc__, prog="./run.sh verify")
    parser.add_argument("folder", type=Path, help="of a race that has ended")
    folder = parser.parse_args(arguments).folder
    for name, why in (("race.json", "is no race's folder"),
                      ("verdict.json", "holds a race that has not ended: repeat its command")):
        load.require((folder / name).exists(), f"{folder} {why}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what the race says on its way
            plan, told, row, sides = race.ended(folder)
        found = [*problems(plan, told, row, sides)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise load.UserError(f"{folder}: race.json or verdict.json is not as a race of one copy "
                             f"leaves it ({type(error).__name__}: {error}); its command writes "
                             "both anew") from None
    count = sum(len(runs) for runs, _ in sides.values())
    fine = (f"{folder}: the scripts, settings, data and machines of {count} logs fit, and give "
            f"this patch and this verdict (level {plan.options.level})")
    print(*map(logs.printable, found or [fine]), sep="\n")
    return 3 if found else 0

if __name__ == "__main__":
    sys.exit(load.run(main))
