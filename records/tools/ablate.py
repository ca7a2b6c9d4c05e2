"""What is each part of a change worth? Races a copy without each part against the whole copy:

    ./run.sh ablate my_record.py [--vs=train_gpt.py] [night's options] [preset] [flags]
    ./run.sh ablate train_gpt.py --part="short windows: --windows=LL" [--part=...]

Each place in which the copy differs from --vs is a part, unless it holds comments alone. Lines of
the copy that end with `# part: NAME`, wherever they stand, are the part NAME instead; in a place
that has other lines as well, the marked ones count as added. --part="NAME: FLAGS" adds a part that
flags leave out. If --vs is the copy itself, its parts are the marked lines and those of --part.

Patches that take out one part each, so that the lines of --vs stand in its places, are the ideas of
a night against the whole copy (see night.py), at a level that is divided by the number of parts. A
part pays if the loss is surely higher without it, and harms if it is surely lower. Parts that
cannot be left out one by one are to be marked as one. All lies in records/night_ablate_NAME: the
night, the table, and the shortest change that keeps what pays (NAME.py and NAME.patch).
"""

import difflib
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs, night, race, verdict
from records.tools.load import ROOT, ArgumentParser, require, run
from records.tools.trial import Entry, script_text

from data.common import write_whole

MARK = re.compile(r"# part: ([^#]*[^#\s])")
WORDS = {"worse": "pays", "better": "harms", "no difference": "makes no difference",
         "undecided": "not shown", "broken": "does not train without it"}

@dataclass
class Part:
    name: str
    places: list  # (start, new, old): lines of the copy from one on, and those of --vs for them
    flags: str = ""

    def __str__(self):
        return f"{self.name} {self.flags}".strip()

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

def all_parts(script: str, vs: str, by_flags: list[str]) -> list[Part]:
    """Those of the copy, and those that flags leave out."""
    text, old = script_text(script), script_text(vs)
    if old == text:
        old = "".join(line for line in text.splitlines(True) if not mark_of(line))
    parts = parts_of(old, text)
    for one in by_flags:
        name, _, flags = one.partition(":")
        require(flags.strip(), f"--part={one!r}: expected a name, a colon and flags")
        parts.append(Part(name.strip(), [], flags.strip()))
    require(parts, f"{script} differs from {vs} in no more than comments: there is no part")
    return parts

def write_patch(path: Path, text: str, vs: str, flags: str = ""):
    """A patch that makes this text of `vs`, as a night takes it."""
    new, old = Entry("", path.stem, shlex.split(flags), text), Entry("", vs, [], script_text(vs))
    write_whole(path, verdict.patch_of(new, old))

def table_of(rows: list[tuple[Part, dict]]) -> str:
    """In Markdown. What is lost without a part is its difference from the whole copy."""
    text = ("| part | lost without it | interval | pairs | 1 / E, adjusted | verdict |\n"
            "|---|---|---|---|---|---|\n")
    for part, row in rows:
        lost = logs.number(row["difference"], "+.4f")
        between = logs.interval(row["interval"], "+.4f")
        sure = logs.number(row["E"] and min(1, len(rows) / row["E"]), ".2g")
        word = WORDS.get(row["decision"], row["decision"])
        text += f"| {part} | {lost} | {between} | {row['pairs']} | {sure} | {word} |\n"
    return text

def main(arguments=None):
    os.chdir(ROOT)
    parser = ArgumentParser(description=__doc__, prog="./run.sh ablate",
                            usage="%(prog)s my_record.py [night's options] [preset] [flags]")
    parser.add_argument("script")
    parser.add_argument("--vs", default="train_gpt.py", help="(default: train_gpt.py)")
    parser.add_argument("--level", type=float, default=0.01, help="(default: 0.01)")
    parser.add_argument("--part", action="append", default=[], metavar="NAME: FLAGS",
                        help="a part that these flags leave out")
    options, words = parser.parse_known_args(arguments)
    script, text = options.script, script_text(options.script)
    parts = all_parts(script, options.vs, options.part)
    with tempfile.TemporaryDirectory() as ideas:
        for number, part in enumerate(parts, 101):  # so that their names keep the order
            path = Path(ideas, f"without_{number}_{race.name_of(part.name)}.patch")
            write_patch(path, without(text, part), script, part.flags)
        one = night.Night([ideas, *words, f"--vs={script}",
                           f"--name=ablate_{race.name_of(script)}",
                           f"--level={options.level / len(parts)}"])
        rows = [*zip(parts, one.spend())]
    write_whole(one.folder / "table.md", table_of(rows))
    print(f"\n{table_of(rows)}")
    out = [part for part, row in rows if row["decision"] in ("better", "no difference")]
    path = one.folder / f"{Path(script).stem}.patch"
    write_whole(path.with_suffix(".py"), without(text, *out))
    write_patch(path, without(text, *out), options.vs)
    race.say(f"{path} keeps what pays; it leaves out: {', '.join(map(str, out)) or 'nothing'}",
             who="ablate")

if __name__ == "__main__":
    sys.exit(run(main))
