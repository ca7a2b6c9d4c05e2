"""Race a copy of the script, the candidate, against the script, by runs with the same seeds:

    ./run.sh race my_record.py [--vs=train_gpt.py] [preset] [flags]
    ./run.sh race my_record.patch                  or "train_gpt.py --muon_lr=0.04"
    ./run.sh race my_record.py --text=FILE         on a text of your own

Both scripts train with the same seed, that is, from the same weights on the same data, and then
with the next seed. Several ideas are a night (./run.sh night --help).

Pairs are added until it is decided whether the candidate is better or worse, its losses are the
baseline's to the last digit in two pairs, or --most pairs are done. The e-value that decides, at
1 / --level, may be looked at after every pair (judge.py says why), so more pairs may be added.

The race runs copies of the scripts, which may be edited meanwhile. Each trains one step first, and
its exam shows mistakes at once. After each pair, exam.py examines both final checkpoints: their
losses on a part of the text that no run was given are what the verdict judges. A copy that fails is
out, unless --dishonest lets it race on, and so is one of which a phase (its import, its checks, its
warm-up, a step, its exam) takes three times as long as the baseline's, and two minutes. In front of
a patch may stand `flags: --muon_lr=0.04`, its own, and `why: NOTE`.

All lies in records/race_NAME: scripts, logs, exams.json, race.html, a page that is written after
every run, and in the end a verdict (verdict.txt, verdict.json), a picture (race.png) and what was
changed (NAME.patch). records/ideas.csv gets a line. Interrupted, or with a higher --most, the same
command goes on.

The flags of run.sh go to both sides: a preset (speedrun, short or demo), --text=FILE_OR_FOLDER, and
all settings of ./run.sh train --help. Those in one word with a copy go to it alone. A candidate's
checkpoints stay only if --save_every asks for it. Unless --val_loss_every is given, runs validate
on the way and near the end, where the slope tells how many steps and seconds a nat is worth.

--json prints verdict.json alone, a list with one object:
  candidate, script, patch (its SHA-256), honest, pairs, why (in words), note (by --why)
  decision: better, worse, no difference, undecided, broken (it does not run) or dishonest
  keep: whether it is better, honest, has the baseline's number of tokens, and is not shown to
    take more seconds to the baseline's final loss or to have a wrong clock
  difference (candidate - baseline, in nats a token), its interval, E, adjusted (1 / E); p is null,
    since no p-value may be looked at so often
  steps_later (than the baseline to its loss, by its own curve; below 0 if earlier), steps_interval;
    seconds_later, seconds_interval: the same in training time; slower: whether these show it
  hours: of its runs and exams; copy, baseline: hashes of the scripts with their flags
  seconds, tokens, parameters, baseline_seconds and so on. What is not known is null.
Exit status: 0 if it is to be kept, 4 if it is undecided, else 3; 2 if it could not be raced.
"""

import contextlib
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import judge, kept, ledger, load, logs, plot, trial, verdict
from records.tools.load import ROOT, ArgumentParser, UserError, between, locked, require
from records.tools.launch import DEMO_RUNS
from records.tools.tables import runs_of
from records.tools.trial import Entry, script_text

from tqdm import tqdm

from data.common import sha256, write_whole

VALIDATION = {"--val_files", "--val_tokens", "--val_seq_len", "--vocab_size", "--text"}

@dataclass
class Race:
    folder: Path
    candidate: Entry
    baseline: Entry
    options: Namespace
    text: dict | None = None  # on which runs are examined, as trial.text_for has it
    places: dict = field(default_factory=dict)  # {seed: where the exam of its runs begins in it}
    baselines: Path = Path()  # where runs of baselines are kept
    key: str = ""  # of those of this baseline
    end: float = math.inf  # of the hours for it, by time.monotonic()
    longest: float = 0.0  # seconds of a pair
    foretold: bool = False

    @property
    def racers(self):
        return [self.candidate, self.baseline]

    @property
    def seeds(self):
        first = self.options.seed
        return [str(seed) for seed in range(first, first + self.options.most)]

    @property
    def racing(self):
        """Whether it goes on."""
        return not (self.candidate.problem or self.candidate.decided)

def say(text: str, who: str = "race"):
    tqdm.write(f"{who}: {logs.printable(text)}", file=sys.stdout)
    sys.stdout.flush()

# ---- Plan ----------------------------------------------------------------------------------------

# A script or a patch with flags of its own in one word. Both may hold spaces.
SCRIPT = re.compile(r"(?s)(['\"]?)([^-'\"].*?\.(?:py|patch|diff))\1(?:\s+(-.*))?")

def parse(arguments) -> Race:
    """The plan of a race."""
    parser = ArgumentParser(description=__doc__, prog="./run.sh race",
                            usage="%(prog)s my_record.py [options] [preset] [flags]")
    add = parser.add_argument
    add("--vs", default="train_gpt.py", help="the baseline (train_gpt.py)")
    add("--most", type=between(1), default=12, help="pairs, unless it is decided before (12)")
    add("--level", type=between(1e-9, 0.5, float), default=0.01,
        help="the chance of a wrong decision (0.01)")
    add("--hours", type=between(0, kind=float), default=math.inf, help="in which it is to end")
    add("--name", help="of the race (the copy's)")
    add("--why", default="", help="a note of one line, for ./run.sh ideas")
    add("--records", default="records", help="where the race's folder lies (records)")
    add("--baselines", help="where their runs are kept (beside the race)")
    add("--seed", type=between(0), default=1, help="the first one (1)")
    add("--dishonest", action="store_true", help="race on though an exam sees what must not be")
    add("--json", action="store_true", help="print verdict.json alone")
    options, words = parser.parse_known_args(arguments)
    require("/" not in (options.name or ""), f"--name={options.name}: a name has no /")
    scripts = [found for word in words if (found := SCRIPT.fullmatch(word))]
    require(scripts, "no word names a copy: ./run.sh race my_record.py [preset] [flags]")
    require(len(scripts) == 1, f"{scripts[-1][0]}: a race has one copy; put several into a folder, "
            "and ./run.sh night FOLDER races them")
    word, script, own = scripts[0].group(0, 2, 3)
    flags = [each for each in words if each != word]
    text, head = trial.patched(script, options.vs)
    try:
        own = shlex.split(f"{head.get('flags', '')} {own or ''}")
    except ValueError as error:
        raise UserError(f"{word}: cannot be split into flags ({error}); close its quotes") from None
    for flag in own:
        require(flag.partition("=")[0] not in VALIDATION, f"{flag}: losses compare only on one "
                "validation text, so this flag takes effect on both sides or on none: give it as a "
                "word of its own")
    for flag in flags + own:
        require(flag.partition("=")[0] not in ("--resume", "--check"),
                f"{flag}: a race starts runs of its own; leave it out")
    baseline = Entry(name_of(options.vs), options.vs, flags, script_text(options.vs))
    name = name_of(script)
    name += "_ours" * (name == baseline.name)
    candidate = Entry(name, script, flags + own, text, note=options.why or head.get("why", ""))
    records = Path(options.records).expanduser()
    return Race(records / f"race_{options.name or name}", candidate, baseline, options,
                baselines=Path(options.baselines or records / "baselines"),
                end=time.monotonic() + 3600 * options.hours)

def name_of(script: str) -> str:
    return re.sub(r"[^\w.-]+", "_", Path(script).stem)

# ---- Check ---------------------------------------------------------------------------------------

def definition(race: Race) -> dict:
    """What must not change while a race goes on."""
    found = {"version": 4, "text": race.text, "key": race.key, "first_seed": race.options.seed,
             "NPROC": os.environ.get("NPROC"), "candidates": [race.candidate.name]}
    return found | {f"{racer.name}.{key}": getattr(racer, key) for racer in race.racers
                    for key in ("script", "sha256", "flags", "dishonest")}

def check(race: Race):
    """Refuses if the race in this folder is of something else. Scripts that are new to it are
    tried, and what is raced is written down. Then reads the runs that are done."""
    path = race.folder / "race.json"
    try:
        before = dict(json.loads(path.read_text() if path.exists() else "{}"))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove {race.folder} to begin "
                        "anew") from None
    restore(race, before)
    changed = [f"{key} was {before[key]} and is {value}"
               for key, value in definition(race).items() if before.get(key, value) != value]
    require(not changed, f"{race.folder} was begun with other scripts or flags: "
            f"{'; '.join(changed)}. Go back to them, remove that folder, or give this race "
            "a --name of its own")
    for racer in race.racers:
        racer.kept = str(race.folder / f"{racer.name}.py")
        write_whole(Path(racer.kept), racer.text)
    announce(race)
    exam = (race.text or {}).get("exam")
    if not race.key or exam and not os.path.exists(exam):
        race.text, before = None, {}  # what is not kept is made again
    order = race.racers if race.end == math.inf else race.racers[::-1]  # what it may take, first
    new = [racer for racer in order if f"{racer.name}.sha256" not in before]
    for racer in new:
        if race.racing:  # else the baseline need not be tried
            try_out(race, racer)
    if new and race.racing:
        say("exams compute the verdict's losses, on text that no run is given" if race.text["exam"]
            else "the validation text is too short for exams, so the verdict uses the runs' own")
    if race.racing:
        write_definition(race)
    if done := sum(len(racer.done) for racer in race.racers):
        say(f"{runs_of(done, 'run')} are done")

def restore(race: Race, told: dict):
    """Takes over what race.json tells, the runs that are done, and what their exams found."""
    path = race.folder / "exams.json"
    found = json.loads(path.read_text() if path.exists() else '{"places": {}, "exams": {}}')
    race.text, race.key = told.get("text"), told.get("key", "")
    race.places = found["places"]
    for racer in race.racers:
        racer.dishonest = told.get(f"{racer.name}.dishonest", "")
        racer.exams = found["exams"].get(racer.name, {})
        racer.done = trial.finished(racer, logs.read([race.folder / racer.name])[0], race.seeds)
        racer.allowed = race.baseline.took if racer is not race.baseline else {}
    race.baseline.took.update(told.get("took", {}))
    set_times(race)

def write_definition(race: Race):
    told = definition(race) | {"took": race.baseline.took}
    write_whole(race.folder / "race.json", json.dumps(told, indent=1))

def announce(race: Race):
    one, most = race.candidate, race.options.most
    say(f"{one.name} against {race.baseline.name}: at most {runs_of(most, 'pair')} of runs, from "
        f"seed {race.options.seed} on, in {race.folder}, where race.html shows it as it goes")
    for row in ledger.read_all(race.folder.parent):
        same = [row["copy"], row["baseline"]] == [one.digest, race.baseline.digest]
        if same and row["race"] != race.folder.name:
            say(f"{one.name} was raced before: {row['decision']} in {row['race']}")
    say(kept.limited(race.baselines))
    if judge.e_of_pairs([1.0] * most) < 1 / race.options.level:
        say(f"--most={most} is too few pairs to show that a copy is better")

def try_out(race: Race, racer: Entry):
    """One step on one process, so that a mistake has one traceback, and its exam."""
    say(f"checking {racer.script}: one step that does not count, and its exam")
    folder = race.folder / "one_step"
    try:
        one = trial.run(racer, race.seeds[0], folder, "--num_iterations=1", "--val_loss_every=0",
                        NPROC="1")
        race.text = race.text or trial.text_for(one, race.baselines)
        if racer is race.baseline:
            race.key = kept.key_of(racer, one)
        judge_exam(race, racer, trial.examine(racer, one)["problem"])
    except UserError as error:
        if not race.text and racer is not race.baseline:
            try_out(race, race.baseline)  # for it may be this machine that is to blame
        drop(race, racer, str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)

def drop(race: Race, racer: Entry, problem: str):
    """With a problem of the candidate, its race ends. One of the baseline is an error."""
    require(racer is not race.baseline, problem)
    racer.problem = problem
    say(f"{racer.name} is out: {problem}")

def judge_exam(race: Race, racer: Entry, problem: str | None, where: str = ""):
    """A candidate whose exam saw a problem is out too, unless the user says otherwise."""
    if problem:
        racer.dishonest = racer.dishonest or f"{racer.script}{where}: {problem}"
        if not race.options.dishonest:
            drop(race, racer, f"{racer.dishonest}; it is not raced, unless you add --dishonest")

# ---- Run -----------------------------------------------------------------------------------------

def run_pair(race: Race, pair: int):
    """Train, examine and judge what a pair still lacks. Who begins alternates, so that a machine
    that grows slower favours no side."""
    seed = race.seeds[pair - 1]
    began = time.monotonic()
    take_runs(race, seed)
    missing = [racer for racer in race.racers if seed not in racer.runs]
    for racer in missing if pair % 2 else missing[::-1]:
        if race.racing:
            train(race, racer, seed, pair)
            verdict.write_page(race, verdict.outcome_of(race), alive=True)
    for racer in race.racers[::-1]:  # the baseline shows how long an exam takes
        if race.racing and seed not in racer.exams:
            examine(race, racer, seed)
    if race.racing:
        look(race)
    race.longest = max(race.longest, (time.monotonic() - began) * bool(missing))

def take_runs(race: Race, seed: str):
    """Takes the runs of a pair that are done, and what their exams found."""
    for racer in race.racers:
        if seed in racer.done and not race.candidate.decided:
            racer.runs[seed] = racer.done[seed]
            take_exam(race, racer, seed)

def train(race: Race, racer: Entry, seed: str, pair: int):
    what = f"pair {pair} of at most {race.options.most}, {racer.name}, seed {seed}"
    say(what)
    store = race.baselines / race.key
    folder = race.folder if racer is race.candidate else store / race.folder.name
    try:
        with tqdm(desc=racer.name, unit="step", disable=None, leave=False) as bar:
            make = partial(trial.run, racer, seed, folder / racer.name, *race.text["flags"],
                           watch=partial(move, race, bar))
            one = make() if racer is race.candidate else kept.once(store, racer, seed, make)
        if time.time() - os.path.getmtime(one.path) > kept.HOUR and pair % kept.EVERY == 1:
            say(f"{what}: trains again, to see whether this machine is as fast as then")
            trial.run(racer, seed, race.folder / "again", *race.text["flags"], "--save_every=0")
    except UserError as error:
        return drop(race, racer, str(error))
    racer.runs[seed] = one
    say(f"{what}: val loss {one.loss:.4f} after {one.steps} steps, {one.seconds:.1f} s of training")

def set_times(race: Race):
    """Those of kept runs, by the ones that were trained again."""
    again = trial.finished(race.baseline, logs.read([race.folder / "again"])[0],
                           race.baseline.done)
    if again:
        factor = kept.rescale(race.baseline.done, again, race.candidate)
        say(f"kept runs of {race.baseline.name} took 1 s where they take {factor:.3f} s now")

def examine(race: Race, racer: Entry, seed: str):
    """The exam of a run. The place in the text is drawn after all runs of the pair have ended."""
    say(f"the exam of {racer.name}, seed {seed}")
    run = racer.runs.pop(seed)
    words = []
    if race.text["exam"]:
        left, tokens = race.text["left"], race.text["tokens"]
        place = race.places.setdefault(seed, random.SystemRandom().randrange(left - tokens))
        words = [f"--text={race.text['exam']}", f"--place={place}", f"--tokens={tokens}"]
    try:
        racer.exams[seed] = trial.examine(racer, run, *words)
    except UserError as error:
        return drop(race, racer, str(error))
    if racer is race.baseline:
        run = kept.copied(run, racer, race.folder / racer.name)
        write_definition(race)
    racer.done[seed] = racer.runs[seed] = run
    set_times(race)
    write_whole(race.folder / "exams.json", json.dumps(
        {"places": race.places, "exams": {one.name: one.exams for one in race.racers}}, indent=1))
    if racer is race.candidate and "--save_every" not in " ".join(racer.flags):
        shutil.rmtree(os.path.splitext(run.path)[0], ignore_errors=True)
    take_exam(race, racer, seed)

def take_exam(race: Race, racer: Entry, seed: str):
    """From here on, the loss of a run is what its exam found, if there is one."""
    found = racer.exams.get(seed, {})
    judge_exam(race, racer, found.get("problem"), f", seed {seed}")
    if found.get("text"):
        racer.runs[seed].loss = found["text"]

def move(race: Race, bar: tqdm, line: str):
    """The progress bar, by a line of a run's output."""
    if found := logs.line_of(line.strip()):
        bar.total = found.total
        bar.update(found.step - bar.n)
        if not race.foretold and found.step >= max(1, min(10, found.total)):
            foretell(race, found)

def foretell(race: Race, line: logs.Line):
    """Says how long the race takes at most, by the pace of its first run, and what it can show."""
    race.foretold = True
    most = race.options.most
    left = 2 * most - sum(len(one.done) for one in race.racers)
    times = [tqdm.format_interval(n * line.seconds / line.step * line.total) for n in (1, left)]
    say(f"a run trains for {times[0]}; at most {runs_of(left)} take {times[1]}, plus their exams")
    runs, _ = logs.read([race.baselines / race.key])
    if len(runs) < 3 and {race.baseline.script, *race.baseline.flags} <= {"train_gpt.py", "demo"}:
        runs, _ = logs.read([DEMO_RUNS])
    sd = judge.sd_of([one.loss for one in runs if one.steps == line.total])
    if effect := judge.smallest_effect(most, race.options.level):
        size = f"{2**0.5 * sd * effect:.4f} nats" if sd else f"{effect:.2g} SDs of the differences"
        say(f"with {runs_of(most, 'pair')}, half of all races detect a difference of about {size}")

def look(race: Race):
    """After a pair: whether it is decided, and how the candidate stands."""
    one = race.candidate
    pairs = verdict.pairs_of(one, race.baseline)
    if any(ours.validated_on != theirs.validated_on for ours, theirs in pairs):
        one.problem = (f"{one.script}: no loss compares, for the validation data or the vocabulary "
                       "are not the baseline's")
        return
    row = verdict.outcome_of(race).row
    one.standing = verdict.in_words(pairs, row, race.options)
    one.decided = row["decision"] != "undecided"
    say(f"{one.name}: {one.standing}")

# ---- Judge again ---------------------------------------------------------------------------------

JUDGED_BY = ("most", "level", "dishonest")  # which may change on the way

def sums(folder: Path) -> dict:
    """The SHA-256 of each log, of what the race's own clock says beside it, and of the exams."""
    paths = [path for name in ("*/*.log", "*/*.clock", "exams.json") for path in folder.glob(name)]
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(paths)}

def note_end(race: Race):
    """Adds to race.json what it takes to judge the race again."""
    path = race.folder / "race.json"
    options = {name: getattr(race.options, name) for name in JUDGED_BY}
    told = json.loads(path.read_text()) | {"options": options, "logs": sums(race.folder),
                                           "notes": {one.name: one.note for one in race.racers}}
    write_whole(path, json.dumps(told, indent=1))

def ended(folder: Path) -> tuple[Race, dict, dict, dict]:
    """The race that ended in this folder, judged by its logs anew; race.json; what stands in
    verdict.json, of which the race only takes what broke; what logs.read finds for each side."""
    told, (row,) = (json.loads((folder / name).read_text(encoding="utf-8"))
                    for name in ("race.json", "verdict.json"))
    ours, = told["candidates"]
    theirs, = {key[:-7] for key in told if key.endswith(".sha256")} - {ours}
    sides = {name: logs.read([folder / name]) for name in (ours, theirs)}
    options = Namespace(seed=told["first_seed"], **told["options"])
    candidate, baseline = [
        Entry(name, told[f"{name}.script"], told[f"{name}.flags"],
              Counter(run.source for run in runs).most_common(1)[0][0],
              note=told.get("notes", {}).get(name, ""))
        for name, (runs, _) in sides.items()]
    if row["decision"] in ("broken", "dishonest"):
        candidate.problem = row["why"]
    race = Race(folder, candidate, baseline, options)
    restore(race, told)
    for seed in race.seeds:
        take_runs(race, seed)
        if race.racing and all(seed in one.runs for one in race.racers):
            look(race)
    return race, told, row, sides

# ---- Conclude ------------------------------------------------------------------------------------

def conclude(race: Race) -> int:
    """Write the verdict, the pictures and the change; returns the exit status."""
    found = verdict.outcome_of(race)
    texts = verdict.texts_of(race, found)
    for name, text in texts.items():
        write_whole(race.folder / name, text)
    verdict.write_page(race, found, alive=False)
    if found.sides:
        note_end(race)
        print(f"\n{texts['verdict.txt']}", end="", flush=True)
        plot.save(race.folder / "race.png", found.sides, found.comparison, None)
        say(f"the logs, verdict.txt, race.html and race.png are in {race.folder}")
        if race.racing:
            say(f"{race.candidate.name}: {race.candidate.standing}")
    try:
        ledger.add(race.folder.parent, race.folder.name, found.row)
    except OSError as error:
        say(f"warning: {race.folder.parent / 'ideas.csv'} cannot be written ({error.strerror}), so "
            "./run.sh ideas does not know of this race")
    if found.row["keep"]:
        return 0
    return {"undecided": 4, "broken": 2, "dishonest": 2}.get(found.row["decision"], 3)

def main(arguments=None) -> int:
    os.chdir(ROOT)
    race = parse(sys.argv[1:] if arguments is None else arguments)
    one = race.candidate
    require(one.flags != race.baseline.flags or not os.path.samefile(one.script, race.options.vs),
            f"{one.script} would race itself, with the same settings: name a copy, or give it "
            "flags in one word with it (a second file with equal text shows how far runs spread)")
    console = sys.stderr if race.options.json else sys.stdout
    alone = locked(race.folder / ".lock", "this race is running already; wait for it, or give "
                   "this one a --name of its own")
    with contextlib.redirect_stdout(console), alone:
        check(race)
        try:
            for pair in range(1, race.options.most + 1):
                if race.racing and time.monotonic() + race.longest < race.end:
                    run_pair(race, pair)
        except KeyboardInterrupt:
            say("the same command goes on from the runs that are done")
            conclude(race)
            raise
        status = conclude(race)
    if race.options.json:
        print((race.folder / "verdict.json").read_text(encoding="utf-8"))
    require(status != 2, one.problem)
    return status

if __name__ == "__main__":
    sys.exit(load.run(main))
