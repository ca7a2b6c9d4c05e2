"""What is each part of a change worth? Races a copy without each part against the whole copy:

    ./run.sh ablate my_record.py [--vs=train_gpt.py] [race's options] [preset] [flags]
    ./run.sh ablate train_gpt.py --part="short windows: --windows=LL" [--part=...]

Each place in which the copy differs from --vs is a part, unless it holds comments alone. Lines of
the copy that end with `# part: NAME`, wherever they stand, are the part NAME instead; in a place
that has other lines as well, the marked ones count as added. --part="NAME: FLAGS" adds a part that
flags leave out. If --vs is the copy itself, its parts are the marked lines and those of --part.

Copies without a part, in whose places stand the lines of --vs, race together against the whole one
(see race.py), at a level that is divided by the number of parts. A part pays if the loss is surely
higher without it, and harms if it is surely lower; the interval, ±, holds for all parts at once.
Parts that cannot be left out one by one are to be marked as one. Interrupted, the same command goes
on. All lies in records/ablate_NAME: the copies, the race, the table, and the shortest change that
keeps what pays (NAME.py and NAME.patch).
"""

import difflib
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs, race
from records.tools.load import ROOT, ArgumentParser, require, run

MARK = re.compile(r"# part: ([^#]*[^#\s])")
WORDS = {"worse": "pays", "better": "harms", "no difference": "makes no difference",
         "undecided": "not shown", "broken": "does not train without it"}

@dataclass
class Part:
    name: str
    places: list  # (start, new, old): lines of the copy from one on, and those of --vs for them
    flags: str = ""

    @property
    def words(self):
        return f"{self.name} {self.flags}".strip()

    @property
    def file(self):
        return "without_" + re.sub(r"\W+", "_", self.name)

say = partial(race.say, who="ablate")

def mark_of(line: str) -> str:
    return "".join(MARK.findall(line)[:1])

def parts_of(old: str, new: str) -> list[Part]:
    """The parts of a change, in the order of their first places. In a place of as many lines as
    before, each replaces one. Otherwise its first lines without a mark replace all old ones."""
    old, new = old.splitlines(True), new.splitlines(True)
    parts = {}
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        changed = old[i:i_end] + new[j:j_end]
        if tag == "equal" or all(re.match(r"\s*(#|$)", line) for line in changed):
            continue
        as_many = i_end - i == j_end - j
        unmarked = not all(map(mark_of, new[j:j_end]))
        groups = [(mark, [*group]) for mark, group in groupby(new[j:j_end], mark_of)]
        for mark, lines in groups or [("", [])]:
            end = i + len(lines) if as_many else i if mark and unmarked else i_end
            name = mark or f"line {j + 1}"
            parts.setdefault(name, Part(name, [])).places.append((j, lines, old[i:end]))
            i = end
            j += len(lines)
    return list(parts.values())

def without(text: str, *parts: Part) -> str:
    """The copy with the lines of --vs in the places of some parts."""
    lines = text.splitlines(True)
    for start, new, old in sorted(chain(*[part.places for part in parts]), reverse=True):
        lines[start:start + len(new)] = old
    return "".join(lines)

def parse(arguments):
    """race.py's options and those of --part, the script, and the words for a race."""
    parser = ArgumentParser(description=__doc__, prog="./run.sh ablate",
                            usage="%(prog)s my_record.py [race's options] [preset] [flags]")
    parser.add_argument("--part", action="append", default=[], metavar="NAME: FLAGS",
                        help="a part that these flags leave out")
    own, words = parser.parse_known_args(arguments)
    require(words and re.fullmatch(r"[^-].*\.py", words[0]),
            "the first word names the copy: ./run.sh ablate my_record.py [preset] [flags]")
    options = race.parse(words).options
    options.part = own.part
    return options, words[0], words[1:]

def parts_to_race(options, script: str, folder: Path) -> tuple[str, list[Part]]:
    """The copy's text and its parts, and writes a copy without each."""
    text = race.script_text(script)
    old = base = race.script_text(options.vs)
    if base == text:
        old = "".join(line for line in text.splitlines(True) if not mark_of(line))
    parts = parts_of(old, text)
    for one in options.part:
        name, colon, flags = one.partition(":")
        require(colon and flags.strip(), f"--part={one!r}: expected a name, a colon and flags")
        parts.append(Part(name.strip(), [], flags.strip()))
    require(parts, f"{script} differs from {options.vs} in no more than comments: there is no part")
    names = [part.file for part in parts]
    require(len({*names}) == len(names), f"two parts are called {max(names, key=names.count)}: "
            "give them other names")
    require(len(parts) > 1 or parts[0].flags or without(text, *parts) != base,
            f"all of the change is one part, and {script} without it is {options.vs}: there is "
            f"nothing to run that ./run.sh race {script} --vs={options.vs} does not")
    for part in parts:
        (folder / f"{part.file}.py").write_text(without(text, part), encoding="utf-8")
    return text, parts

def write_table(parts: list[Part], rows: dict, folder: Path):
    """In Markdown. What is lost without a part is its difference from the whole copy."""
    text = ("| part | lost without it | pairs | p or 1 / E, adjusted | verdict |\n"
            "|---|---|---|---|---|\n")
    for part in parts:
        row = rows[part.file]
        lost = logs.number(row["difference"], "+.4f")
        if row["interval"]:
            low, high = row["interval"]
            lost += f" ± {(high - low) / 2:.4f}"
        sure = logs.number(row["adjusted"], ".2g")
        word = WORDS.get(row["decision"], row["decision"])
        text += f"| {part.words} | {lost} | {row['pairs']} | {sure} | {word} |\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")

def write_shortest(options, script: str, text: str, parts, rows, folder: Path):
    """The copy without what harms or makes no difference."""
    out = [part for part in parts if rows[part.file]["decision"] in ("better", "no difference")]
    path = folder / Path(script).name
    path.write_text(without(text, *out), encoding="utf-8")
    new, old = (race.Entry(name, name, [], race.script_text(file))
                for name, file in ((script, path), (options.vs, options.vs)))
    path = path.with_suffix(".patch")
    path.write_text(race.verdict.patch_of(new, old), encoding="utf-8")
    left_out = ", ".join(part.words for part in out) or "nothing"
    say(f"{path} keeps what pays; it leaves out: {left_out}")

def main(arguments=None):
    options, script, words = parse(sys.argv[1:] if arguments is None else arguments)
    os.chdir(ROOT)
    folder = Path(options.records).expanduser() / f"ablate_{Path(script).stem}"
    folder.mkdir(parents=True, exist_ok=True)
    text, parts = parts_to_race(options, script, folder)
    copies = [f"{folder / part.file}.py {part.flags}".strip() for part in parts]
    race.main([*copies, *words, f"--vs={script}", f"--records={folder}", "--name=parts",
               f"--level={options.level / len(parts)}"])
    verdict = (folder / "race_parts" / "verdict.json").read_text(encoding="utf-8")
    rows = {row["candidate"]: row for row in json.loads(verdict)}
    for row in rows.values():  # Holm's adjustment may show more than the race decided
        if row["adjusted"] is not None and row["adjusted"] <= options.level:
            row["decision"] = "worse" if row["difference"] > 0 else "better"
    write_table(parts, rows, folder)
    write_shortest(options, script, text, parts, rows, folder)

if __name__ == "__main__":
    sys.exit(run(main))
