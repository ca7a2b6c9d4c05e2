"""What is each part of a change worth? Races a copy without each part against the whole copy:

    ./run.sh ablate my_record.py [--vs=train_gpt.py] [race's options] [preset] [flags]
    ./run.sh ablate train_gpt.py --part="short windows: --windows=LLLL" [--part=...]

Parts are the places in which the copy differs from --vs. Places that share a name which only one of
the two scripts has, such as a definition and its use, are one part. To draw other lines between
parts, end lines of the copy with `# part: NAME`: these lines, and the places that share names with
them alone, are the part NAME. (A line with two such marks belongs to both parts. In a place that
has other lines as well, the marked ones count as added.) --part="NAME: FLAGS" adds a part that
flags leave out. Places that change nothing but comments are no part. If --vs is the copy itself,
its parts are the marked lines and what flags leave out.

For each part there is a copy without it: in its places, the lines are those of --vs. Copies that do
not train one step are joined to one, without all of their parts; if that does not train either,
these parts cannot be left out, and are said to be so.

The copies race together against the whole one (see race.py, whose options apply), at a level that
is divided by the number of parts, so that any of the decisions is wrong with no more than the
chance --level. A part pays if the loss is surely higher without it, and harms if it is surely
lower. In the table, ± is the interval of the race, which holds for all parts at once and so is
stricter than a verdict. Interrupted, the same command goes on.

Everything lies in records/ablate_NAME: the copies, the race, the table (table.md, printed too), and
the shortest change that keeps what pays (NAME.py and NAME.patch): without the parts that harm or
make no difference. What is not shown stays in it.
"""

import ast
import contextlib
import difflib
import hashlib
import io
import json
import keyword
import os
import re
import sys
import tokenize
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs, race
from records.tools.load import ROOT, ArgumentParser, UserError, require, run

MARK = re.compile(r"# part: ([^#]*[^#\s])")
WORDS = {"worse": "pays", "better": "harms", "no difference": "makes no difference",
         "undecided": "not shown"}

@dataclass(frozen=True)
class Place:
    """Lines of the copy, and the lines of --vs that they replace."""
    start: int
    new: tuple[str, ...]
    old: tuple[str, ...]
    names: frozenset[str]  # names that only one of the scripts has
    marks: tuple[str, ...]

@dataclass
class Part:
    name: str
    places: list[Place]
    flags: str = ""

    @property
    def lines(self):
        return (f"-{sum(len(place.old) for place in self.places)} "
                f"+{sum(len(place.new) for place in self.places)}") if self.places else self.flags

    @property
    def file(self):
        return "without_" + re.sub(r"\W+", "_", self.name)

# ---- Parts ---------------------------------------------------------------------------------------

def words_by_line(text: str, kinds) -> dict[int, set[str]]:
    """Line number, from 0 -> the words in its tokens of some kinds."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            words = found.setdefault(token.start[0] - 1, set())
            words |= set(re.findall(r"[^\W\d]\w*", token.string))
    return found

def pieces(old: range, new: range, marks: list) -> list[tuple[range, range]]:
    """One place of a diff, divided where the marks of its new lines change. If the lines are as
    many as before, each replaces an old one. Otherwise those with a mark were added, and the first
    ones without a mark replace all old ones."""
    found = []
    left = old
    for mark, group in groupby(range(len(new)), key=lambda k: marks[k]):
        lines = list(group)
        count = len(lines) if len(old) == len(new) else 0 if mark and not all(marks) else len(left)
        found.append((left[:count], new[lines[0]:lines[-1] + 1]))
        left = left[count:]
    return found or [(old, new)]

def places_of(old: str, new: str) -> list[Place]:
    """Where the copy differs."""
    texts = [text.splitlines(True) for text in (old, new)]
    words = [words_by_line(text, (tokenize.NAME, tokenize.STRING)) for text in (old, new)]
    names = [words_by_line(text, (tokenize.NAME,)).values() for text in (old, new)]
    own = (set().union(*names[0]) ^ set().union(*names[1])) - set(keyword.kwlist)
    found = []
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        marks = [MARK.findall(line) for line in texts[1][j:j_end]]
        for rows in pieces(range(i, i_end), range(j, j_end), marks) if tag != "equal" else ():
            lines = [tuple(text[k] for k in part) for text, part in zip(texts, rows)]
            inside = [table.get(k, set()) for table, part in zip(words, rows) for k in part]
            own_marks = tuple(MARK.findall(lines[1][0])) if lines[1] else ()
            found.append(Place(rows[1].start, lines[1], lines[0],
                               frozenset(own.intersection(set().union(*inside))), own_marks))
    return found

def without(text: str, places) -> str:
    """The copy with the lines of --vs in these places."""
    lines = text.splitlines(True)
    for place in sorted(set(places), key=lambda place: place.start, reverse=True):
        lines[place.start:place.start + len(place.new)] = place.old
    return "".join(lines)

def program(text: str) -> str | None:
    """What a script does, without comments and docstrings; None if it is no program."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    documented = (ast.FunctionDef, ast.ClassDef, ast.Module)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.dump(tree)

def parts_of(old: str, new: str) -> list[Part]:
    """The parts of a change, in the order of their first places."""
    whole = program(new)
    require(whole, "the copy is no Python program")
    places = [place for place in places_of(old, new) if program(without(new, [place])) != whole]
    groups = {}  # mark -> its places
    for place in places:
        for mark in place.marks:
            groups.setdefault(mark, []).append(place)
    marked = {mark: frozenset().union(*[place.names for place in group])
              for mark, group in groups.items()}
    loose = []  # lists of unmarked places that share names
    for place in places:
        if not place.marks:
            touching = [group for group in loose if any(place.names & one.names for one in group)]
            loose = [group for group in loose if group not in touching]
            loose.append([*chain(*touching), place])
    for group in loose:
        names = frozenset().union(*[place.names for place in group])
        marks = [mark for mark, own in marked.items() if own & names]
        groups.setdefault(marks[0] if len(marks) == 1 else title(new, group), []).extend(group)
    parts = [Part(name, sorted(group, key=lambda place: place.start))
             for name, group in groups.items()]
    return sorted(parts, key=lambda part: part.places[0].start)

def title(text: str, places) -> str:
    """What unmarked places are called: by the names that they bring, or by where they stand."""
    after = {name for place in places for line in place.new for name in re.findall(r"\w+", line)}
    brought = sorted({name for place in places for name in place.names} & after)
    if brought:
        return " ".join(brought[:3])
    first = min(place.start for place in places)
    above = re.findall(r"(?m)^\s*(?:def|class) (\w+)", "".join(text.splitlines(True)[:first + 1]))
    return f"{above[-1] if above else 'line'} {first + 1}"

# ---- The race ------------------------------------------------------------------------------------

def parse(arguments):
    parser = ArgumentParser(description=__doc__, prog="./run.sh ablate",
                            usage="%(prog)s my_record.py [options] [preset] [flags]")
    parser.add_argument("--vs", default="train_gpt.py", metavar="SCRIPT", help="what was changed "
                        "(default: train_gpt.py)")
    parser.add_argument("--part", action="append", default=[], metavar="NAME: FLAGS",
                        help="a part that these flags leave out")
    parser.add_argument("--records", default="records", help="where the folder lies")
    parser.add_argument("--level", type=race.number, default=0.01, help="the chance of any wrong "
                        "decision (default: 0.01)")
    options, words = parser.parse_known_args(arguments)
    require(words and re.fullmatch(r"[^-]\S*\.py", words[0]),
            "the first word names the copy: ./run.sh ablate my_record.py [preset] [flags]")
    return options, words[0], words[1:]

def problem_without(part: Part, text: str, folder: Path, words) -> str:
    """Writes the copy without a part, and says why it does not train one step; "" if it does."""
    path = folder / f"{part.file}.py"
    path.write_text(without(text, part.places), encoding="utf-8")
    if part.flags:
        return ""  # the race tries it
    if program(path.read_text(encoding="utf-8")) is None:
        return "it is no Python program"
    one = race.parse([str(path), f"--records={folder}", *words])
    with contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            race.one_step(one, one.candidates[0])
        except UserError as error:
            lines = output.getvalue().strip().splitlines() or [str(error)]
            return logs.printable(lines[-1])
    return ""

def tried(parts: list[Part], text: str, folder: Path, words) -> list[Part]:
    """The parts that can be left out, those joined that cannot alone. What fails is said."""
    problems = [problem_without(part, text, folder, words) for part in parts]
    good = [part for part, problem in zip(parts, problems) if not problem]
    bad = [part for part, problem in zip(parts, problems) if problem]
    for part, problem in zip(parts, problems):
        if problem:
            say(f"it does not train without {part.name} alone: {problem}")
    if len(bad) > 1:
        joined = Part("the rest", list(chain(*[part.places for part in bad])))
        problem = problem_without(joined, text, folder, words)
        if not problem:
            say(f"{', '.join(part.name for part in bad)} are joined to one part, the rest")
            return [*good, joined]
    if bad:
        say(f"{', '.join(part.name for part in bad)} cannot be left out")
    return good

def say(text: str):
    print(f"ablate: {text}", flush=True)

def parts_to_race(options, script: str, words, folder: Path) -> tuple[str, list[Part]]:
    """The copy's text and its parts. What could be left out is written down, so that a race that
    goes on has the same parts."""
    text = race.script_text(script)
    old = race.script_text(options.vs)
    if old == text:
        old = "".join(line for line in text.splitlines(True) if not MARK.search(line))
    parts = parts_of(old, text)
    for one in options.part:
        name, colon, flags = one.partition(":")
        require(colon and flags.strip(), f"--part={one!r}: expected a name, a colon and flags")
        parts.append(Part(name.strip(), [], flags.strip()))
    files = [part.file for part in parts]
    twice = [part.name for part in parts if files.count(part.file) > 1]
    require(not twice, f"two parts are called {twice[:1]}: give them other names")
    require(parts, f"{script} does not differ from {options.vs} in anything but comments: there is "
            "no part")
    path = folder / "parts.json"
    now = {"scripts": hashlib.sha256(f"{old}\0{text}".encode()).hexdigest(), "part": options.part}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        require(all(before.get(key) == now[key] for key in now), f"{folder} was begun with other "
                "scripts or parts: go back to them, or remove it to begin anew")
        places = {place.start: place for part in parts for place in part.places}
        return text, [Part(name, [places[start] for start in starts], flags)
                      for name, starts, flags in before["parts"]]
    problem = problem_without(Part("nothing", []), text, folder, words)
    require(not problem, f"{script} does not train one step: {problem}")
    parts = tried(parts, text, folder, words)
    require(parts, "no part can be left out")
    now["parts"] = [[part.name, [place.start for place in part.places], part.flags]
                    for part in parts]
    path.write_text(json.dumps(now, indent=1), encoding="utf-8")
    return text, parts

def decision(row: dict, level: float) -> str:
    """What a copy without a part is. Holm's adjustment may show more than the race decided."""
    if row["adjusted"] is not None and row["adjusted"] <= level:
        return "worse" if row["difference"] > 0 else "better"
    return row["decision"]

def table_of(parts: list[Part], rows: dict, level: float) -> str:
    """In Markdown. What is lost without a part is its difference from the whole copy."""
    header = ("part", "lines", "lost without it", "pairs", "p or 1 / E, adjusted", "verdict")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for part in parts:
        row = rows[part.file]
        found = decision(row, level)
        lost = "-" if row["difference"] is None else f"{row['difference']:+.4f}"
        if row["interval"]:
            low, high = row["interval"]
            lost += f" ± {(high - low) / 2:.4f}"
        adjusted = "-" if row["adjusted"] is None else f"{row['adjusted']:.2g}"
        lines.append(f"| {part.name} | {part.lines} | {lost} | {row['pairs']} | {adjusted} | "
                     f"{WORDS.get(found, found)} |")
    return "\n".join(lines) + "\n"

def write_shortest(options, script: str, text: str, parts, rows, folder: Path):
    """The copy without what harms or makes no difference."""
    out = [part for part in parts
           if decision(rows[part.file], options.level) in ("better", "no difference")]
    shortest = without(text, [place for part in out for place in part.places])
    name = Path(script).stem
    (folder / f"{name}.py").write_text(shortest, encoding="utf-8")
    diff = difflib.unified_diff(race.script_text(options.vs).splitlines(True),
                                shortest.splitlines(True), options.vs, script)
    (folder / f"{name}.patch").write_text("".join(diff), encoding="utf-8")
    left_out = ", ".join(part.name for part in out) or "nothing"
    say(f"the shortest change that keeps what pays is {folder / name}.patch; it leaves out: "
        f"{left_out}")
    for part in out:
        if part.flags:
            say(f"to leave out {part.name}, add {part.flags}")

def main(arguments=None):
    options, script, words = parse(sys.argv[1:] if arguments is None else arguments)
    os.chdir(ROOT)
    folder = Path(options.records, f"ablate_{Path(script).stem}")
    folder.mkdir(parents=True, exist_ok=True)
    text, parts = parts_to_race(options, script, words, folder)
    say(f"{len(parts)} parts: {', '.join(part.name for part in parts)}")
    copies = [f"{folder / part.file}.py {part.flags}".strip() for part in parts]
    race.main([*copies, f"--vs={script}", f"--records={folder}", "--name=parts",
               f"--level={options.level / len(parts)}", *words])
    verdict = (folder / "race_parts" / "verdict.json").read_text(encoding="utf-8")
    rows = {row["candidate"]: row for row in json.loads(verdict)}
    table = table_of(parts, rows, options.level)
    (folder / "table.md").write_text(table, encoding="utf-8")
    print(f"\n{table}")
    write_shortest(options, script, text, parts, rows, folder)

if __name__ == "__main__":
    sys.exit(run(main, errors=(logs.BadInput,)))
