"""Race a copy of the script against the script, by pairs of runs with the same seed:

    ./run.sh race my_record.py [--vs=train_gpt.py] [--repeat=5] [preset] [flags]
    ./run.sh race train_gpt.py --only_ours="--muon_lr=0.04"      two settings of one script

Both scripts train in turn, --repeat times each, with seeds that both sides share: layers that a
change leaves alone then begin with the same weights, and the data come in the same order, so that
the differences of the pairs spread far less than the runs do. Each run is started as run.sh starts
any other, on the same number of processes and threads. Before the first one each script trains one
step, which does not count but shows its mistakes, and records/honesty.py checks that its validation
loss is honest. A copy that fails is not raced, unless --dishonest says so; the verdict then begins
with what the check saw.

The race lies in records/race_NAME, a folder of logs for each side; NAME is the copy's, or --name.
If it is interrupted, the same command goes on with it; it refuses if a script or a flag has changed
since. A run that was cut short starts anew, unless you resume it yourself: its seed counts once it
is finished, with the same script and settings on the same machine. With a higher --repeat the
command adds pairs. It ends with the verdict of compare.py (verdict.txt), a picture (race.png) and
what was changed (NAME.patch).

Flags go to both sides as they are, those in --only_ours to the copy alone. --seed=N makes N the
first seed (default 1), --records=FOLDER moves the race, and --target=LOSS is a loss to reach, which
the verdict then judges with the time to it. No checkpoint is saved unless --save_every asks for it.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "records" / "launch.py"
HONESTY = ROOT / "records" / "honesty.py"
sys.path.insert(0, str(ROOT))
from records import compare, logs, stats

with logs.installed():
    from tqdm import tqdm

    from data.common import ArgumentParser, UserError, require, run

STEP = re.compile(r"step:(\d+)/(\d+) (?:.*?val_loss:(\S+))?")
LOG = re.compile(r"(?m)^log: (.+)$")
NOTE = "dishonest.txt"  # what the check of honesty saw, for a verdict that may come much later

@dataclass
class Racer:
    """One side of a race."""
    name: str  # of its runs, and of their folder
    script: str
    sha256: str
    flags: list[str]  # the preset first, if one is given

@dataclass
class Race:
    folder: Path
    ours: Racer
    theirs: Racer
    seeds: list[int]
    target: float | None
    dishonest: bool  # whether scripts are raced that fail the check of their honesty

    def racers(self):
        return self.ours, self.theirs

# ---- What is raced -------------------------------------------------------------------------------

def parse(arguments) -> Race:
    parser = ArgumentParser(description=__doc__, prog="./run.sh race")
    parser.add_argument("script", metavar="my_record.py", help="the copy")
    parser.add_argument("--vs", default="train_gpt.py", metavar="SCRIPT", help="what it races "
                        "against (default: train_gpt.py)")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of runs (default: 5)")
    parser.add_argument("--only_ours", default="", metavar="FLAGS", help="flags of the copy alone")
    parser.add_argument("--name", help="of the race (default: the copy's)")
    parser.add_argument("--records", default="records", help="where the race's folder lies")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--target", type=float, help="a validation loss to reach")
    parser.add_argument("--dishonest", action="store_true", help="race a script that fails the "
                        "check of its honesty all the same")
    options, flags = parser.parse_known_args(arguments)
    require(options.script.endswith(".py"), f"found {options.script!r} as the first word, expected "
            "the copy's file: ./run.sh race my_record.py [preset] [flags]")
    require(options.repeat > 0, f"--repeat={options.repeat}: takes a number above 0")
    require(options.seed >= 0, f"--seed={options.seed}: takes the first seed, 0 or more")
    try:
        only_ours = shlex.split(options.only_ours)
    except ValueError as error:
        raise UserError(f"--only_ours={options.only_ours}: cannot be split into flags ({error}); "
                        "close its quotes") from None
    for flag in [*flags, *only_ours]:
        require(flag.partition("=")[0] not in ("--resume", "--check"),
                f"{flag}: a race starts runs of its own; leave it out")
    names = [Path(script).stem for script in (options.script, options.vs)]
    if names[0] == names[1]:
        names[0] += "_ours"
    own = [*flags, *only_ours]
    ours = Racer(names[0], options.script, script_hash(options.script), own)
    theirs = Racer(names[1], options.vs, script_hash(options.vs), flags)
    folder = Path(options.records, f"race_{options.name or names[0]}")
    seeds = list(range(options.seed, options.seed + options.repeat))
    return Race(folder, ours, theirs, seeds, options.target, options.dishonest)

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
    """What must not change while a race goes on; pairs may be added."""
    sides = {f"{side}.{key}": value for side in ("ours", "theirs")
             for key, value in asdict(getattr(race, side)).items()}
    return {"version": 2, **sides, "first_seed": race.seeds[0], "NPROC": os.environ.get("NPROC")}

def begin_or_go_on(race: Race):
    """Write down what is raced; or refuse if a race of this name is of something else."""
    race.folder.mkdir(parents=True, exist_ok=True)
    path = race.folder / "race.json"
    now = definition(race)
    if not path.exists():
        path.write_text(json.dumps(now, indent=1))
    try:
        before = json.loads(path.read_text())
        changed = [f"{key} was {before.get(key)} and is {now.get(key)}"
                   for key in now | before if before.get(key) != now.get(key)]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove {race.folder} to begin "
                        "anew") from None
    require(not changed, f"{race.folder} was begun with other scripts or flags: "
            f"{'; '.join(changed)}. Go back to them, or give this race a --name of its own")

# ---- The runs ------------------------------------------------------------------------------------

def counted(race: Race, racer: Racer) -> dict:
    """{seed: run} of the finished runs of one side: the first of each seed."""
    found = {}
    for one in logs.read([race.folder / racer.name])[0]:
        same = hashlib.sha256(one.source.encode()).hexdigest() == racer.sha256
        whole = one.finished and not (one.diverged or one.changed or one.mixed)
        if same and whole and one.seed in map(str, race.seeds):
            found.setdefault(int(one.seed), one)
    return found

def say(text: str, end: str = "\n"):
    print(f"race: {logs.printable(text)}", end=end, flush=True)

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
        return None, output
    return Path(named[-1]), output

def one_step(race: Race, racer: Racer):
    """A run of one step that does not count, to show the script's mistakes: on one process, so that
    their traceback is the last of its output. A script may refuse that number of steps, so that
    two are tried then."""
    records = race.folder / "one_step"
    for steps in (1, 2):
        more = [f"--num_iterations={steps}", "--val_loss_every=0", "--save_every=0"]
        path, output = start(racer, race.seeds[0], records, lambda line: None, more, NPROC="1")
        last = output.strip().rpartition("\n")[2]
        if path or "num_iterations" not in last:
            break
    if not path:
        print(logs.printable(output[-20_000:]), file=sys.stderr)
        raise UserError(f"{racer.script} fails in a run of {steps} step{'s' * (steps > 1)}, whose "
                        "output is above; mend it and start the race again")
    one = logs.read_run(path, path.stem)
    shutil.rmtree(records)
    require(one.finished and one.seed == str(race.seeds[0]), f"{racer.script}: its log says "
            f"seed = {one.seed} at step {one.steps}, expected --seed={race.seeds[0]} and a "
            "validation after the last step; a race needs both")

def check_honesty(race: Race):
    """Refuses a script whose validation loss is not honest; or notes it, with --dishonest."""
    found = []
    for racer in race.racers():
        flags = [flag for flag in racer.flags if not flag.startswith("--text=")]
        done = subprocess.run([sys.executable, "-W", "ignore", str(HONESTY), racer.script, *flags],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace",
                              check=False)
        last = logs.printable(done.stdout.strip().rpartition("\n")[2])
        if done.returncode:  # 3: it is not honest; another one: it could not be checked
            found.append(f"{racer.script}: {last}")
            require(race.dishonest, f"{found[-1]}; it is not raced, unless you add --dishonest")
    note = race.folder / NOTE
    note.unlink(missing_ok=True)
    if found:
        note.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")

def show(line: str, bar: tqdm):
    """Moves the progress bar to the step that a line of output tells."""
    found = STEP.match(line)
    if found:
        bar.total = int(found[2])
        if found[3]:
            bar.set_postfix(val_loss=found[3], refresh=False)
        bar.update(int(found[1]) - bar.n)

# ---- The race ------------------------------------------------------------------------------------

def missing_runs(race: Race):
    """(pair, racer, seed) of what is still to run; who begins alternates from pair to pair, so
    that a machine that grows slower does not favour one side."""
    done = [counted(race, racer) for racer in race.racers()]
    found = []
    for i, seed in enumerate(race.seeds):
        order = [0, 1] if i % 2 == 0 else [1, 0]
        found += [(i + 1, race.racers()[side], seed) for side in order if seed not in done[side]]
    return found

def pairs_done(race: Race):
    ours = counted(race, race.ours)
    theirs = counted(race, race.theirs)
    return [(ours[seed], theirs[seed]) for seed in race.seeds if seed in ours and seed in theirs]

def standing(race: Race) -> str:
    pairs = pairs_done(race)
    losses = [[pair[side].loss for pair in pairs] for side in (0, 1)]
    test = stats.paired(*losses)
    lower = sum(a < b for a, b in zip(*losses))
    text = (f"after {len(pairs)} pair{'s' * (len(pairs) != 1)}: {race.ours.name} "
            f"{sum(losses[0]) / len(pairs):.4f}, {race.theirs.name} "
            f"{sum(losses[1]) / len(pairs):.4f}, difference {test['difference']:+.4f}, lower in "
            f"{lower} of {len(pairs)}")
    if test["p"] is not None:
        text += f", paired p = {test['p']:.2g}"
    return text

def run_all(race: Race):
    """Train what is missing. A run that fails ends the race, with its output."""
    missing = missing_runs(race)
    total = 2 * len(race.seeds)
    if len(missing) < total:
        say(f"{total - len(missing)} of {total} runs are done")
    else:
        say("one step of each script, which does not count, to see whether it runs")
        try:
            for racer in race.racers():
                one_step(race, racer)
            check_honesty(race)
        except UserError:  # a script that is mended may begin the race
            (race.folder / "race.json").unlink()
            raise
    began = time.monotonic()
    for i, (pair, racer, seed) in enumerate(missing):
        what = f"pair {pair} of {len(race.seeds)}, {racer.name}, seed {seed}"
        say(what)
        with tqdm(desc=racer.name, unit="step", disable=None, leave=False) as bar:
            path, output = start(racer, seed, race.folder / racer.name, partial(show, bar=bar))
        if not path:
            print(logs.printable(output[-20_000:]), file=sys.stderr)
            raise UserError(f"{racer.script} failed with seed {seed}, see its output above; the "
                            "same command goes on with this run")
        one = counted(race, racer).get(seed)
        require(one, f"{path}: the log is of no finished run of {racer.script} with seed {seed}; "
                "it does not count, start the race again")
        say(f"{what}: val loss {one.loss:.4f} after {one.steps} steps, {one.seconds:.1f} s of "
            "training")
        runs_left = len(missing) - i - 1
        if runs_left:
            seconds = (time.monotonic() - began) / (i + 1) * runs_left
            say(f"{runs_left} runs are left, about {tqdm.format_interval(seconds)}")
        if len(counted(race, race.ours)) == len(counted(race, race.theirs)):
            say(standing(race))

def finish(race: Race):
    """The verdict, the picture and the change."""
    pairs = pairs_done(race)
    picture = race.folder / "race.png"
    arguments = [*[ours.path for ours, _ in pairs], "--vs", *[theirs.path for _, theirs in pairs],
                 "--plot", str(picture)]
    if race.target is not None:
        arguments.append(f"--target={race.target}")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        compare.main(arguments)
    note = race.folder / NOTE
    verdict = (note.read_text(encoding="utf-8") if note.exists() else "") + out.getvalue()
    print()
    print(verdict, end="", flush=True)
    (race.folder / "verdict.txt").write_text(verdict, encoding="utf-8")
    texts = [script_text(racer.script).splitlines(True) for racer in (race.theirs, race.ours)]
    patch = difflib.unified_diff(*texts, race.theirs.script, race.ours.script)
    (race.folder / f"{race.ours.name}.patch").write_text("".join(patch), encoding="utf-8")
    say(f"the logs, verdict.txt and {picture.name} are in {race.folder}")

def main():
    os.chdir(ROOT)
    race = parse(sys.argv[1:])
    require(race.target is None or math.isfinite(race.target), "--target must be a number")
    say(f"{race.ours.name} against {race.theirs.name}: {len(race.seeds)} pairs of runs, seeds "
        f"{race.seeds[0]} to {race.seeds[-1]}, in {race.folder}")
    begin_or_go_on(race)
    try:
        run_all(race)
    except KeyboardInterrupt:
        done = sum(len(counted(race, racer)) for racer in race.racers())
        print()
        say(f"{done} of {2 * len(race.seeds)} runs are done; the same command goes on from there")
        raise
    finish(race)

if __name__ == "__main__":
    sys.exit(run(main, errors=(logs.BadInput,)))
