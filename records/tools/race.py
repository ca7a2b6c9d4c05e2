"""Race copies of the script against the script, by runs with the same seeds:

    ./run.sh race my_record.py [--vs=train_gpt.py] [preset] [flags]
    ./run.sh race a.py b.py "train_gpt.py --muon_lr=0.04"        several candidates, one baseline
    ./run.sh race train_gpt.py --only_ours="--muon_lr=0.04"      two settings of one script

All scripts train in turn with the same seed, then with the next one. Layers that a change leaves
alone begin with the same weights then, and the data come in the same order, so that the differences
of such pairs spread far less than the runs do. Each run is started as run.sh starts any other, on
the same number of processes and threads.

Pairs are added until it is decided whether a candidate is better or worse than the baseline, or
--most of them are done (12). The e-value that decides may be looked at after every pair (judge.py
says why), so pairs may also be added later: with a higher --most, the same command goes on. A
candidate is decided where E reaches 1 / --level (0.01). To be better among several candidates takes
more, since the best of many looks good by chance; who is worse drops out at once. With --worth=W, a
candidate also drops out once its difference is surely within +-W; and one whose losses are the
baseline's to the last digit in two pairs. With --repeat=N, every candidate gets N pairs instead,
and there is no p-value before the end, and no further pair after it.

Before its first run each script trains one step, which does not count but shows its mistakes, and
./run.sh honest checks that its validation loss is honest. A copy that fails is not raced, unless
--dishonest says so; the verdict then begins with what the check saw.

The race lies in records/race_NAME, a folder of logs for each script; NAME is the first copy's, or
--name. If it is interrupted, the same command goes on with it; it refuses if a script or a flag has
changed since. A run that was cut short starts anew, unless you resume it yourself: its seed counts
once it is finished, with the same script and settings on the same machine. The race ends with the
verdict of compare.py (verdict.txt), the same for programs (verdict.json), a picture (race.png) and
what was changed (NAME.patch). race.html is a page for a browser, which is written after every run
and reloads itself meanwhile. Each candidate gets a line in records/ideas.csv (see ./run.sh ideas).

Flags go to all sides as they are, those in --only_ours to the candidates alone, and those in one
word with a script to that one. --seed=N makes N the first seed (default 1), --records=FOLDER moves
the race, and --target=LOSS is a loss to reach, which the verdict then judges with the time to it.
No checkpoint is saved unless --save_every asks for it.

--json prints verdict.json and nothing else. It is a list with an object for each candidate:
  candidate, script, patch (its SHA-256), honest, pairs, why (in words)
  decision: better, worse, no difference, undecided, broken (it does not run) or dishonest
  keep: whether it is better, honest, and has the baseline's number of tokens
  difference (candidate - baseline, in nats a token), interval (of 1 - level while pairs are added,
    95 % with --repeat), E or p (the other one is null), adjusted (p or 1 / E, by Holm's method for
    the number of candidates)
  steps_later (than the baseline to its loss, by its own curve; below 0 if earlier), steps_interval,
    baseline_steps
  seconds, tokens, parameters, and the baseline's: baseline_seconds and so on; null if it never ran
Exit status: 0 if a candidate is to be kept, else 4 if one is undecided, else 3; 2 if none could be
raced, or the command is wrong.
"""

import contextlib
import difflib
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import compare, judge, ledger, logs, page, plot
from records.tools.load import ROOT, ArgumentParser, UserError, installed, require, run

with installed():
    from tqdm import tqdm

LAUNCH = ROOT / "records" / "tools" / "launch.py"
HONESTY = ROOT / "records" / "tools" / "honesty.py"

STEP = re.compile(r"step:(\d+)/(\d+) (?:.*?val_loss:(\S+))?")
LOG = re.compile(r"(?m)^log: (.+)$")

@dataclass
class Racer:
    """A script and its flags."""
    name: str  # of its runs, and of their folder
    script: str
    flags: list[str]  # the preset first, if one is given
    sha256: str = ""
    runs: dict = field(default_factory=dict)  # {seed: finished run}, the first of each seed
    problem: str = ""  # why it cannot be raced
    dishonest: str = ""  # what the check of its honesty saw
    out: int | None = None  # after how many pairs it was decided

@dataclass
class Race:
    folder: Path
    candidates: list[Racer]
    baseline: Racer
    first_seed: int
    repeat: int | None  # None: until decided
    most: int
    level: float
    worth: float | None
    target: float | None
    allow_dishonest: bool
    as_json: bool

    @property
    def racers(self):
        return [*self.candidates, self.baseline]

    @property
    def seeds(self):
        return range(self.first_seed, self.first_seed + (self.repeat or self.most))

    @property
    def racing(self):
        """The candidates that still race."""
        return [one for one in self.candidates if not one.problem and one.out is None]

# ---- What is raced -------------------------------------------------------------------------------

def number(text):
    """A number above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value

def parse(arguments) -> Race:
    parser = ArgumentParser(description=__doc__, prog="./run.sh race",
                            usage="%(prog)s my_record.py [more.py ...] [options] [preset] [flags]")
    parser.add_argument("--vs", default="train_gpt.py", metavar="SCRIPT", help="the baseline "
                        "(default: train_gpt.py)")
    parser.add_argument("--most", type=int, default=12, help="pairs, unless it is decided before "
                        "(default: 12)")
    parser.add_argument("--level", type=number, default=0.01, help="the chance of a wrong decision "
                        "(default: 0.01)")
    parser.add_argument("--worth", type=number, metavar="W", help="a difference in nats a token "
                        "below which a candidate is not worth more pairs")
    parser.add_argument("--repeat", type=int, help="a fixed number of pairs")
    parser.add_argument("--only_ours", default="", metavar="FLAGS", help="flags for the copies")
    parser.add_argument("--name", help="of the race (default: the first copy's)")
    parser.add_argument("--records", default="records", help="where the race's folder lies")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--target", type=number, help="a validation loss to reach")
    parser.add_argument("--dishonest", action="store_true", help="race a script that fails the "
                        "check of its honesty all the same")
    parser.add_argument("--json", action="store_true", help="print verdict.json alone")
    options, words = parser.parse_known_args(arguments)
    scripts = [word for word in words if re.match(r"[^-]\S*\.py(\s|$)", word)]
    flags = [word for word in words if word not in scripts]
    require(scripts, "no word names a copy: ./run.sh race my_record.py [preset] [flags]")
    for name in ("repeat", "most"):
        value = getattr(options, name)
        require(value is None or value > 0, f"--{name}={value}: takes a number above 0")
    require(options.level < 1, f"--level={options.level}: takes a number below 1")
    require(not options.repeat or options.level == 0.01, "--repeat judges at a level of 0.01: "
            "leave --level out, or --repeat")
    require(options.seed >= 0, f"--seed={options.seed}: takes the first seed, 0 or more")
    baseline = Racer(Path(options.vs).stem, options.vs, flags, script_hash(options.vs))
    candidates = []
    for word in scripts:
        script, *own = split(word, word)
        own = [*own, *split(options.only_ours, f"--only_ours={options.only_ours}")]
        name = Path(script).stem
        if name in [racer.name for racer in [baseline, *candidates]]:
            name += re.sub(r"[^\w.]+", "_", f" {' '.join(own)}" if len(scripts) > 1 else "_ours")
        candidates.append(Racer(name, script, [*flags, *own], script_hash(script)))
    racers = [*candidates, baseline]
    for flag in [flag for racer in racers for flag in racer.flags]:
        require(flag.partition("=")[0] not in ("--resume", "--check"),
                f"{flag}: a race starts runs of its own; leave it out")
    names = [racer.name for racer in racers]
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"two candidates are called {twice[:1]}: give their files other names")
    folder = Path(options.records, f"race_{options.name or names[0]}")
    return Race(folder, candidates, baseline, options.seed, options.repeat, options.most,
                options.level, options.worth, options.target, options.dishonest, options.json)

def split(text, what):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{what}: cannot be split into flags ({error}); close its quotes") from None

def script_text(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{script}: cannot be read ({error}); name a script in or below "
                        f"{ROOT}") from None

def script_hash(script: str) -> str:
    """As a log names it."""
    return hashlib.sha256(script_text(script).encode()).hexdigest()

def definition(race: Race) -> dict:
    """What must not change while a race goes on. Scripts that cannot be raced are left out, so that
    they may be mended."""
    found = {"version": 3, "first_seed": race.first_seed, "repeat": race.repeat,
             "NPROC": os.environ.get("NPROC"), "candidates": [one.name for one in race.candidates]}
    for racer in race.racers:
        if not racer.problem:
            found |= {f"{racer.name}.{key}": getattr(racer, key)
                      for key in ("script", "sha256", "flags", "dishonest")}
    return found

def begin_or_go_on(race: Race):
    """Refuses if a race of this name is of something else. Scripts that are new are tried, and what
    is raced is written down."""
    path = race.folder / "race.json"
    before = {}
    if path.exists():
        try:
            before = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove {race.folder} to begin "
                            "anew") from None
    new = [racer for racer in race.racers if f"{racer.name}.sha256" not in before]
    for racer in race.racers:
        racer.dishonest = before.get(f"{racer.name}.dishonest", "")
    now = definition(race)
    known = [key for key in now if not any(key.startswith(f"{racer.name}.") for racer in new)]
    changed = [f"{key} was {before.get(key)} and is {now[key]}" for key in known
               if before and before.get(key) != now[key]]
    require(not changed, f"{race.folder} was begun with other scripts or flags: "
            f"{'; '.join(changed)}. Go back to them, or give this race a --name of its own")
    if new:
        say("one step of each script, which does not count, to see whether it runs")
    for racer in new:
        if not race.racing:  # then the baseline need not be tried
            return
        try:
            one_step(race, racer)
            check_honesty(race, racer)
        except UserError as error:
            if racer is race.baseline:
                raise
            racer.problem = str(error)
            say(f"{racer.name} is not raced: {error}")
    if race.racing:
        path.write_text(json.dumps(definition(race), indent=1))
    if new and race.racing:
        say_unequal_weights(race)

# ---- The runs ------------------------------------------------------------------------------------

def counted(race: Race, racer: Racer) -> dict:
    """{seed: run} of the finished runs of one script: the first of each seed."""
    found = {}
    for one in logs.read([race.folder / racer.name])[0]:
        same = hashlib.sha256(one.source.encode()).hexdigest() == racer.sha256
        whole = one.finished and not (one.diverged or one.changed or one.mixed)
        if same and whole and one.seed in map(str, race.seeds):
            found.setdefault(int(one.seed), one)
    return found

def say(text: str):
    tqdm.write(f"race: {logs.printable(text)}", file=sys.stdout)
    sys.stdout.flush()

def start(racer: Racer, seed: int, records: Path, watch, more=(), **variables):
    """Train; (the log that the run names or None, its output). Each line of the output goes to
    watch() as it comes."""
    saves = any(flag.partition("=")[0] == "--save_every" for flag in racer.flags)
    flags = [*racer.flags, *([] if saves else ["--save_every=0"]), f"--seed={seed}",
             f"--name={racer.name}", f"--records={records}", *more]
    output = ""
    with subprocess.Popen([sys.executable, "-W", "ignore", str(LAUNCH), racer.script, *flags],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace",
                          env=os.environ | variables) as program:
        try:
            for line in program.stdout:
                output += line
                watch(line)
        except BaseException:
            program.terminate()
            raise
    named = LOG.findall(output)
    if program.returncode or not named:
        print(logs.printable(output[-20_000:]), file=sys.stderr)
        return None, output
    return Path(named[-1]), output

def one_step(race: Race, racer: Racer):
    """A run of one step that does not count, to show the script's mistakes: on one process, so that
    their traceback is the last of its output. A script may refuse that number of steps, so that
    two are tried then."""
    records = race.folder / "one_step"
    seed = race.first_seed
    for steps in (1, 2):
        more = [f"--num_iterations={steps}", "--val_loss_every=0", "--save_every=0"]
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            path, output = start(racer, seed, records, lambda line: None, more, NPROC="1")
        last = output.strip().rpartition("\n")[2]
        if path or "num_iterations" not in last:
            break
    print(shown.getvalue(), end="", file=sys.stderr)
    advice = "mend it and start the race again"
    if "unrecognized arguments" in last:
        advice = "flags that only the copies know go into --only_ours"
    require(path, f"{racer.script} fails in a run of {steps} step{'s' * (steps > 1)}, whose output "
            f"is above; {advice}")
    one = logs.read_run(path, path.stem)
    shutil.rmtree(records)
    require(one.finished and one.seed == str(seed), f"{racer.script}: its log says "
            f"seed = {one.seed} at step {one.steps}, expected --seed={seed} and a validation "
            "after the last step; a race needs both")

def check_honesty(race: Race, racer: Racer):
    """Refuses a script whose validation loss is not honest; or notes it, with --dishonest."""
    flags = [flag for flag in racer.flags if not flag.startswith("--text=")]
    done = subprocess.run([sys.executable, "-W", "ignore", str(HONESTY), racer.script, *flags],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:  # 3: it is not honest; another one: it could not be checked
        last = logs.printable(done.stdout.strip().rpartition("\n")[2])
        racer.dishonest = f"{racer.script}: {last}"
        require(race.allow_dishonest, f"{racer.dishonest}; it is not raced, unless you add "
                "--dishonest")

def initial_weights(racer: Racer) -> dict:
    """{name of a parameter: shape_hash}; nothing where the script does not tell."""
    flags = [flag for flag in racer.flags if not flag.startswith("--text=")]
    done = subprocess.run([sys.executable, "-W", "ignore", str(HONESTY), racer.script, *flags,
                           "--weights"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          errors="replace", check=False)
    return dict(re.findall(r"(?m)^weights: (\S+) (\S+)$", done.stdout))

def say_unequal_weights(race: Race):
    """Says which candidates' runs do not start where the baseline's of the same seed do: pairs
    differ more then, so that more of them are needed."""
    theirs = initial_weights(race.baseline)
    for one in race.racing:
        ours = initial_weights(one)
        both = [name for name in ours if name in theirs
                and ours[name].partition("_")[0] == theirs[name].partition("_")[0]]
        other = [name for name in both if ours[name] != theirs[name]]
        if other:
            say(f"{one.name} and {race.baseline.name} do not start from equal weights: of "
                f"{len(both)} parameters of the same name and shape {len(other)} differ, such as "
                f"{other[0]}; it takes more pairs to decide")

def curve(run) -> dict:
    """{step: validation loss}"""
    return {line.step: line.loss for line in run.validations if line.loss is not None}

def watcher(race: Race, racer: Racer, seed: int, bar: tqdm):
    """A function that takes the lines of a run's output: it moves the progress bar, and says at
    each validation how the pairs that have come so far differ there."""
    pairs = [(racer, race.baseline)]
    if racer is race.baseline:
        pairs = [(one, racer) for one in race.racing]

    def watch(line: str):
        found = STEP.match(line)
        if not found:
            return
        step = int(found[1])
        bar.total = int(found[2])
        bar.update(step - bar.n)
        if not found[3] or step == 0:
            return
        curves = {(racer.name, seed): {step: float(found[3])}}
        for pair in pairs:
            for one in pair:
                curves |= {(one.name, s): curve(run) for s, run in one.runs.items() if s <= seed}
            tables = {s: [curves.get((one.name, s), {}) for one in pair] for s in race.seeds}
            differences = [a[step] - b[step] for a, b in tables.values() if step in a and step in b]
            if all(step in table for table in tables[seed]):
                say(f"step {step}: {pair[0].name} - {pair[1].name} = {differences[-1]:+.4f}, mean "
                    f"of {len(differences)}: {fmean(differences):+.4f}")

    return watch

# ---- The race ------------------------------------------------------------------------------------

def pairs_of(race: Race, one: Racer, count: int | None = None):
    """The pairs (run of a candidate, run of the baseline) of the first `count` seeds, at most as
    many as decided it."""
    runs = [(one.runs.get(seed), race.baseline.runs.get(seed)) for seed in race.seeds]
    return [pair for pair in runs[:one.out or count] if all(pair)]

def look(race: Race, count: int, quiet: bool):
    """After `count` pairs: who is decided, and how the others stand."""
    tests = {}
    for one in race.candidates:
        pairs = pairs_of(race, one, count)
        if pairs and len({run.validated_on for run in pairs[0]}) > 1:
            one.problem = (f"{one.script}: no loss compares, for the validation data or the "
                           "vocabulary are not the baseline's")
        if pairs and not one.problem:
            losses = [[run.loss for run in runs] for runs in zip(*pairs)]
            tests[one.name] = judge.until_decided(*losses, race.level)
    left = judge.adjusted([test["adjusted"] for test in tests.values()]
                          + [1] * (len(race.candidates) - len(tests)))
    for test, value in zip(tests.values(), left):
        test["adjusted"] = value
    for one in race.racing:
        pairs = pairs_of(race, one, count)
        test = tests[one.name]
        text = (f"after {len(pairs)} pair{'s' * (len(pairs) != 1)}: {one.name} - "
                f"{race.baseline.name} = {test['difference']:+.4f}")
        if not race.repeat:
            same = len(pairs) > 1 and compare.unchanged_losses(pairs)
            decision = compare.decide(test, same, race.level, race.worth)
            one.out = None if decision == "undecided" else count
            more = max(1, (test["needed"] or 0) - len(pairs))
            text += f", E = {test['E']:.3g}: {decision}"
            if one.out is None and test["needed"] and len(pairs) > 1:
                text += f", {more} more such pair{'s' * (more > 1)} would decide it"
        if not quiet:
            say(text)

def run_all(race: Race):
    """Train what is missing, seed by seed. Who begins alternates from seed to seed, so that a
    machine that grows slower favours no side. A candidate whose run fails drops out."""
    for racer in race.racers:
        racer.runs = counted(race, racer)
    done = sum(len(racer.runs) for racer in race.racers)
    if done:
        say(f"{done} runs are done")
    began = time.monotonic()
    made = 0
    for i, seed in enumerate(race.seeds):
        before = made
        order = [*race.racing, race.baseline]
        for racer in order if i % 2 == 0 else order[::-1]:
            if not race.racing:
                return
            if seed in racer.runs or racer.problem:
                continue
            train(race, racer, seed, i + 1)
            made += 1
            show(race, *judged(race)[1:], alive=True)
            left = sum(len(race.seeds) - len(one.runs) for one in [*race.racing, race.baseline])
            if left and race.racing:
                seconds = tqdm.format_interval((time.monotonic() - began) / made * left)
                runs = f"{left} run{'s' * (left > 1)}"
                say(f"{'' if race.repeat else 'at most '}{runs} to go, about {seconds}")
        look(race, i + 1, quiet=made == before)

def train(race: Race, racer: Racer, seed: int, pair: int):
    most = "" if race.repeat else "at most "
    what = f"pair {pair} of {most}{len(race.seeds)}, {racer.name}, seed {seed}"
    say(what)
    with tqdm(desc=racer.name, unit="step", disable=None, leave=False) as bar:
        path, _ = start(racer, seed, race.folder / racer.name, watcher(race, racer, seed, bar))
    if path:
        racer.runs = counted(race, racer)
    one = racer.runs.get(seed)
    if one:
        say(f"{what}: val loss {one.loss:.4f} after {one.steps} steps, {one.seconds:.1f} s of "
            "training")
        return
    problem = f"{racer.script} failed with seed {seed}, see its output above"
    if path:
        problem = f"{path}: the log is of no finished run of {racer.script} with seed {seed}"
    problem += "; the same command goes on with this run"
    require(racer is not race.baseline, problem)
    racer.problem = problem
    say(problem)

# ---- The verdict ---------------------------------------------------------------------------------

def judged(race: Race):
    """The candidates that have pairs; and their sides, the baseline's and the comparisons, as
    compare.py has them."""
    compared = [one for one in race.candidates if pairs_of(race, one)]
    if not compared:
        return [], [], None, []
    labels = ["A"] if len(compared) == 1 else [f"A{i + 1}" for i in range(len(compared))]
    sides = [compare.Side(label, [ours for ours, _ in pairs_of(race, one)], race.target)
             for label, one in zip(labels, compared)]
    baseline = compare.Side("B", list(race.baseline.runs.values()), race.target)
    level = None if race.repeat else race.level
    more = len(race.candidates) - len(compared)
    found = compare.compare_all(sides, baseline, race.target, level, race.worth, more)
    return compared, sides, baseline, found

def patch_of(race: Race, one: Racer) -> str:
    """What was changed: a diff, after the flags."""
    texts = [script_text(racer.script).splitlines(True) for racer in (race.baseline, one)]
    diff = difflib.unified_diff(*texts, race.baseline.script, one.script)
    own = [flag for flag in one.flags if flag not in race.baseline.flags]
    return "".join([f"flags: {shlex.join(own)}\n" * bool(own), *diff])

def verdict_of(race: Race, one: Racer, side, baseline, found) -> dict:
    """An object of verdict.json. side and found are None for a candidate without a pair."""
    test = compare.test_that_speaks(found, "loss") if found else {}
    values = {key: test.get(key) for key in ("difference", "interval", "E", "p", "adjusted")}
    for prefix, runs in (("", side), ("baseline_", baseline if found else None)):
        for key in ("seconds", "tokens", "parameters"):
            known = [getattr(run, key) for run in runs.used] if runs else []
            values[prefix + key] = mean(known) if known and None not in known else None
    steps = found["paired"]["steps"] if found else {}
    values |= {"steps_later": steps.get("difference"), "steps_interval": steps.get("interval"),
               "baseline_steps": baseline.used[0].steps if found else None}
    decision = found["decision"] if found else "undecided"
    if one.problem:
        decision = "dishonest" if one.dishonest and not race.allow_dishonest else "broken"
    equal = values["tokens"] == values["baseline_tokens"]
    return {"candidate": one.name, "script": one.script, "decision": decision,
            "keep": decision == "better" and not one.dishonest and equal,
            "honest": not one.dishonest, "pairs": len(pairs_of(race, one)),
            "why": one.problem or one.dishonest or (found["verdict"] if found else "no pair"),
            "patch": hashlib.sha256(patch_of(race, one).encode()).hexdigest(), **values}

def conclude(race: Race):
    """Write the verdicts for programs."""
    compared, sides, baseline, found = judged(race)
    rows = []
    for one in race.candidates:
        i = compared.index(one) if one in compared else None
        parts = (None, None) if i is None else (sides[i], found[i])
        rows.append(verdict_of(race, one, parts[0], baseline, parts[1]))
    path = race.folder / "verdict.json"
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows, sides, baseline, found

def show(race: Race, sides, baseline, comparisons, alive: bool):
    """Write race.html, from the first pair on. With --repeat it has no p-value before the end."""
    if sides:
        notes = [racer.problem or racer.dishonest for racer in race.racers]
        shown = [] if alive and race.repeat else comparisons
        page.save(race.folder / "race.html", [*sides, baseline], shown, race.target,
                  notes=[note for note in notes if note], alive=alive)

def finish(race: Race) -> int:
    """The verdict, the picture and the changes; returns the exit status."""
    rows, sides, baseline, found = conclude(race)
    for one in race.candidates:
        path = race.folder / f"{one.name}.patch"
        path.write_text(patch_of(race, one), encoding="utf-8")
    if sides:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            compare.report(sides, [baseline], found, race.target)
        notes = [racer.problem or racer.dishonest for racer in race.racers]
        verdict = "".join(f"{note}\n" for note in notes if note) + out.getvalue()
        print(f"\n{verdict}", end="", flush=True)
        (race.folder / "verdict.txt").write_text(verdict, encoding="utf-8")
        pairs = compare.pairs_of(sides[0], baseline) if len(sides) == 1 else ()
        level = None if race.repeat else race.level
        plot.save(str(race.folder / "race.png"), [*sides, baseline], race.target, pairs, level)
        show(race, sides, baseline, found, alive=False)
        say(f"the logs, verdict.txt, race.html and race.png are in {race.folder}")
    ledger.add(race.folder.parent, race.folder.name, rows)
    decisions = {row["decision"] for row in rows}
    if any(row["keep"] for row in rows):
        return 0
    if "undecided" in decisions:
        return 4
    return 3 if decisions - {"broken", "dishonest"} else 2

def main(arguments=None) -> int:
    os.chdir(ROOT)
    race = parse(sys.argv[1:] if arguments is None else arguments)
    with contextlib.redirect_stdout(sys.stderr) if race.as_json else contextlib.nullcontext():
        status = hold(race)
    if race.as_json:
        print((race.folder / "verdict.json").read_text(encoding="utf-8"))
    require(status != 2, "; ".join(one.problem for one in race.candidates))
    return status

def hold(race: Race) -> int:
    names = ", ".join(one.name for one in race.candidates)
    pairs = f"{race.repeat} pairs" if race.repeat else f"at most {race.most} pairs"
    say(f"{names} against {race.baseline.name}: {pairs} of runs, from seed {race.first_seed} on, "
        f"in {race.folder}, where race.html shows it as it goes")
    race.folder.mkdir(parents=True, exist_ok=True)
    begin_or_go_on(race)
    try:
        run_all(race)
    except KeyboardInterrupt:
        print()
        say(f"{sum(len(racer.runs) for racer in race.racers)} runs are done; the same command goes "
            "on from there")
        rows, *shown = conclude(race)
        show(race, *shown, alive=False)
        ledger.add(race.folder.parent, race.folder.name, rows)
        raise
    return finish(race)

if __name__ == "__main__":
    sys.exit(run(main, errors=(logs.BadInput,)))
