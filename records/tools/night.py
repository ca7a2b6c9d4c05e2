"""A night of ideas: races each one in a folder against the script, in the hours that there are.

    ./run.sh night ideas/ [--hours=8] [--vs=best.py] [race's options] [preset] [flags]

An idea is a patch of the baseline (.patch or .diff) or a script (.py). In front of a patch may
stand `flags: --muon_lr=0.04`, which only this idea gets, and `why: a note of one line`. Files may
be added while the night goes on. An edited file is a new idea.

The ideas are raced (see race.py) in the order of their names, each until it is decided, has had
--most pairs (40), or its share of the hours is gone. What is undecided goes on when all have had
their share. With --first=N, all train N steps first, and the half with the higher losses waits. A
winner is raced again on fresh seeds; if it wins again, it is confirmed. With --climb, all ideas
that begin later have it as their baseline. One idea is raced at a time on each GPU, or on a CPU
--at_once of them, which share the cores. Runs of a baseline are made once (see kept.py).

All lies in records/night_NAME, where NAME is the folder's, or --name. Whatever ends a night, the
same command goes on, and loses only the runs that were on their way. --hours are those of all
nights with this command together.

--json prints night.json alone: hours, spent, left, and for each idea an object with file, change
(its text), folder (of its race), stage (look, race or again), hours, confirmed (null if that is not
known) and what verdict.json says (./run.sh race --help). Exit status: 0 if an idea is confirmed,
else 4 if one is undecided, else 3; 2 if none could be raced.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import kept, launch, page, race
from records.tools.load import ROOT, ArgumentParser, between, child, locked, require, run
from records.tools.trial import hash_of, last_line, script_text

from tqdm import tqdm

from data.common import write_whole

RACE = ROOT / "records" / "tools" / "race.py"
FAILED = ("broken", "dishonest")
AGAIN = 1000  # is added to the first seed where a winner is raced again
NOT_RACED = {"decision": "undecided", "keep": False, "pairs": 0, "difference": None, "E": None,
             "interval": None, "note": "", "why": "it has not been raced yet"}
STAGES = {"again": "on fresh seeds", "look": "a first look at", "race": "a race of"}  # in order

say = partial(race.say, who="night")
clock = tqdm.format_interval  # of seconds

@dataclass
class Try:
    """A race of an idea: a first look, the race itself, or again on fresh seeds."""
    file: Path  # of the idea
    change: str  # its text
    vs: str  # the baseline
    flags: list[str]  # of the baseline, where that is an idea which had some
    stage: str
    folder: Path
    row: dict  # of verdict.json
    open: bool  # whether it may go on

def read_json(path: Path, otherwise=None):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise

def is_confirmed(tries: list[Try]) -> bool | None:
    """None where that is not known."""
    last = tries[-1]
    return None if last.stage != "again" or last.open else last.row["keep"]

class Night:
    def __init__(self, arguments):
        parser = ArgumentParser(description=__doc__, prog="./run.sh night",
                                usage="%(prog)s ideas/ [options] [race's options] [preset] [flags]")
        parser.add_argument("ideas", type=Path, help="a folder of patches and scripts")
        parser.add_argument("--hours", type=between(0, kind=float), default=8, help="(default: 8)")
        parser.add_argument("--first", type=between(1), help="steps of a first look")
        parser.add_argument("--at_once", type=between(1), help="races that run at a time")
        parser.add_argument("--climb", action="store_true", help="a winner is the next baseline")
        parser.add_argument("--json", action="store_true", help="print night.json alone")
        self.options, words = parser.parse_known_args(arguments)
        ideas = self.options.ideas
        require(ideas.is_dir(), f"{ideas}: there is no such folder; put patches or scripts into it")
        self.words = ["--most=40", *words]
        self.plan = race.parse(["train_gpt.py", *self.words])  # of any race
        name = self.plan.options.name or race.name_of(str(ideas.resolve()))
        self.folder = self.plan.folder.parent / f"night_{name}"
        self.places = launch.places(self.options.at_once)
        self.running = {}  # {number of a place: (a try, its program, when it began)}
        self.turns = Counter()  # {folder of a race: how often it has begun in this process}
        self.longest = 0.0  # seconds of a pair, with all that belongs to it
        self.broken = {}  # {folder of a race without a verdict, which begins again: a row for it}
        told = read_json(self.folder / "night.json", {"spent": 0.0, "ideas": []})
        self.hours = Counter({Path(row["file"]).name: row["hours"] for row in told["ideas"]})
        self.began = time.monotonic() - 3600 * told["spent"]

    def left(self) -> float:
        """Seconds."""
        return 3600 * self.options.hours - (time.monotonic() - self.began)

    def tries(self) -> list[list[Try]]:
        """The races of each idea. It stays with the baseline that it has begun with."""
        files = sorted(file for file in self.options.ideas.iterdir()
                       if file.suffix in (".py", ".patch", ".diff") and file.is_file())
        found = {}
        vs, flags = self.plan.options.vs, []
        while True:
            for file in files:
                if file not in found or not found[file][0].folder.exists():
                    found[file] = self.tries_of(file, vs, flags)
            won = [tries[-1] for tries in found.values() if self.options.climb
                   and is_confirmed(tries) and tries[-1].vs == vs]
            if not won:
                return [found[file] for file in files]
            best = min(won, key=lambda one: one.row["difference"])
            name = best.row["candidate"]
            vs = str(best.folder / f"{name}.py")
            flags = [flag for flag in read_json(best.folder / "race.json")[f"{name}.flags"]
                     if flag not in self.plan.baseline.flags]

    def tries_of(self, file: Path, vs: str, flags: list[str]) -> list[Try]:
        """A first look at an idea, if that is asked for; its race; that of a winner again."""
        text = file.read_text(encoding="utf-8", errors="replace")
        digest = hash_of(repr((text, script_text(vs), self.plan.baseline.flags, flags,
                               self.plan.options.seed, self.places[0].get("NPROC"))))
        found = []
        for stage in ["look"] * bool(self.options.first) + ["race", "again"]:
            end = f"_{stage}" * (stage != "race")
            folder = self.folder / f"race_{race.name_of(file.name)}-{digest[:6]}{end}"
            row = self.broken.get(folder) or read_json(folder / "verdict.json", [NOT_RACED])[0]
            most = 1 if stage == "look" else self.plan.options.most
            is_open = row["decision"] == "undecided" and row["pairs"] < most
            found.append(Try(file, text, vs, flags, stage, folder, row, is_open))
            if stage == "look" and is_open or stage == "race" and not row["keep"]:
                break
        return found

    def next_tries(self) -> list[Try]:
        """Those that may begin, in their order. The worse half of the first looks waits."""
        found = self.tries()
        looks = sorted((tries[0] for tries in found if tries[0].stage == "look" and len(tries) > 1),
                       key=lambda one: one.row["difference"] or 0.0)
        late = [one.file for one in looks[(len(looks) + 1) // 2:]]
        busy = [one.folder for one, *_ in self.running.values()]
        last = [tries[-1] for tries in found if tries[-1].open and tries[-1].folder not in busy]
        return sorted(last, key=lambda one: (
            self.turns[one.folder], [*STAGES].index(one.stage), one.file in late))

    def begin(self, one: Try, number: int, seconds: float, stack: contextlib.ExitStack):
        """In the place of this number."""
        one.folder.mkdir(parents=True, exist_ok=True)
        flags = one.flags + [f"--num_iterations={self.options.first}"] * (one.stage == "look")
        kept.introduce(one.folder, race.Entry(
            race.name_of(one.vs), one.vs, self.plan.baseline.flags + flags, script_text(one.vs)))
        own = {"look": ["--most=1"], "race": [],
               "again": [f"--seed={self.plan.options.seed + AGAIN}"]}[one.stage]
        command = [RACE, f"'{one.file}'", *self.words, *flags, f"--vs={one.vs}",
                   f"--records={self.folder}", f"--name={one.folder.name[5:]}",
                   f"--hours={seconds / 3600}", f"--baselines={self.plan.baselines}", *own]
        with open(f"{one.folder}.txt", "a", encoding="utf-8") as out:
            program = stack.enter_context(child(
                *map(str, command), env=os.environ | self.places[number], stdout=out, stderr=out))
        self.running[number] = (one, program, time.monotonic())
        self.turns[one.folder] += 1
        say(f"{clock(self.left())} left; {STAGES[one.stage]} {one.file.name}, for at most "
            f"{clock(seconds)}")

    def collect(self):
        """Takes what the races have found that have ended."""
        for number, (one, program, began) in [*self.running.items()]:
            if program.poll() is None:
                continue
            del self.running[number]
            seconds = time.monotonic() - began
            self.hours[one.file.name] += seconds / 3600
            row = read_json(one.folder / "verdict.json", [NOT_RACED])[0]
            if program.returncode not in (0, 3, 4) and row["decision"] not in FAILED:
                why = last_line(Path(f"{one.folder}.txt").read_text("utf-8", "replace"))
                row = self.broken[one.folder] = NOT_RACED | {"decision": "broken", "why": why}
            self.longest = max(self.longest, seconds / max(1, row["pairs"] - one.row["pairs"]))
            say(f"{one.file.name}: {row['why']}")

    def go(self):
        """Races until the hours are gone or nothing is open."""
        with contextlib.ExitStack() as stack:
            while True:
                self.collect()
                tries = self.next_tries()
                free = sorted({*range(len(self.places))} - self.running.keys())
                may_begin = self.left() > self.longest
                for number, one in zip(free, tries if may_begin else ()):
                    turns = [self.turns[each.folder] for each in tries].count(
                        self.turns[one.folder])
                    self.begin(one, number, self.left() * min(1, len(self.places) / turns), stack)
                self.write(alive=bool(self.running))
                if not self.running and not (tries and may_begin):
                    return
                time.sleep(2)

    def write(self, alive: bool) -> list[dict]:
        """night.json and night.html; the ideas in them."""
        rows = []
        for tries in self.tries():
            one = ([each for each in tries if each.row is not NOT_RACED] or tries)[-1]
            rows.append(one.row | {
                "file": str(one.file), "folder": one.folder.name, "stage": one.stage,
                "change": one.change, "hours": self.hours[one.file.name],
                "confirmed": is_confirmed(tries)})
        told = {"hours": self.options.hours, "spent": self.options.hours - self.left() / 3600,
                "left": self.left() / 3600, "baseline": self.plan.options.vs, "ideas": rows}
        write_whole(self.folder / "night.json", json.dumps(told, indent=1))
        write_whole(self.folder / "night.html", page.of_night(told, self.folder, alive))
        return rows

    def spend(self) -> list[dict]:
        """The whole night; its ideas."""
        with locked(self.folder / ".lock", "this night is going on already; give another one a "
                    "--name of its own"):
            try:
                self.go()
            finally:
                rows = self.write(alive=False)
        say(f"{sum(row['confirmed'] or 0 for row in rows)} of {len(rows)} ideas are confirmed; "
            f"{clock(max(0, self.left()))} left; see {self.folder / 'night.html'}")
        return rows

def main(arguments=None) -> int:
    os.chdir(ROOT)
    night = Night(sys.argv[1:] if arguments is None else arguments)
    with contextlib.redirect_stdout(sys.stderr if night.options.json else sys.stdout):
        rows = night.spend()
    if night.options.json:
        print((night.folder / "night.json").read_text(encoding="utf-8"))
    if any(row["confirmed"] for row in rows):
        return 0
    decisions = {row["decision"] for row in rows}
    return 4 if "undecided" in decisions else 3 if decisions - {*FAILED} else 2

if __name__ == "__main__":
    sys.exit(run(main))
