"""Runs of baselines are kept in records/baselines, in a folder of each race that made some, so each
is made once. Another race of the same baseline, settings, data, machine and torch examines and
reads them there, and copies their logs into its own folder."""

import json
import os
import shutil
from pathlib import Path
from statistics import fmean

from data.common import locked, write_whole
from records.tools import logs, trial

MOST_BYTES = 100e9  # of all that is kept
HOUR = 3600  # seconds for which times of one machine compare
EVERY = 8  # pairs of a race, of which the first trains the baseline again for its time

def key_of(entry: trial.Entry, one) -> str:
    """What a run of a baseline depends on, apart from its seed; `one` is its run of one step."""
    place = {name: value for name, value in logs.place_of(one).items() if name != "ranks"}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").count(",")
    return trial.hash_of(repr([entry.digest, entry.name, place, one.trained_on(), one.validated_on,
                               os.environ.get("NPROC"), devices, os.cpu_count()]))[:16]

def run_in(folder: Path, entry: trial.Entry, seed: str):
    return trial.finished(entry, logs.read([folder])[0], [seed]).get(seed)

def once(store: Path, entry: trial.Entry, seed: str, make):
    """The kept run of a seed, or else the one that make() makes in the store. A race that needs a
    run waits for another one that makes it."""
    with locked(store / f".{seed}.lock"):
        return run_in(store, entry, seed) or make()

def copied(one, entry: trial.Entry, folder: Path):
    """Copies the log of a run into a race's folder, with those of its seed that were interrupted;
    the run that is read there."""
    folder.mkdir(exist_ok=True)
    for each in logs.read([Path(one.path).parent])[0]:
        for path in (Path(each.path).with_suffix(".clock"), each.path):
            if each.seed == one.seed and os.path.exists(path):
                shutil.copy2(path, folder)
    return run_in(folder, entry, one.seed)

def limited(baselines: Path) -> str:
    """Removes the oldest runs while all are too large; says how large they are."""
    runs = sorted(baselines.glob("*/*/*/*.log"), key=os.path.getmtime)
    sizes = [sum(each.stat().st_size for each in [log, *log.with_suffix("").glob("*")])
             for log in runs]
    while sum(sizes) > MOST_BYTES:
        log = runs.pop(0)
        sizes.pop(0)
        log.unlink()
        shutil.rmtree(log.with_suffix(""), ignore_errors=True)
    return f"{sum(sizes) / 1e9:.2g} GB of runs are kept in {baselines}"

def introduce(folder: Path, baseline: trial.Entry):
    """Tells a new race what one beside it has found out about its baseline."""
    known = {f"{baseline.name}.{key}": getattr(baseline, key) for key in ("sha256", "flags")}
    for path in folder.parent.glob("race_*/race.json"):
        told = json.loads(path.read_text())
        if known.items() <= told.items() and not (folder / "race.json").exists():
            facts = {key: value for key, value in told.items()
                     if key in ("text", "key", "took") or key.startswith(f"{baseline.name}.")}
            write_whole(folder / "race.json", json.dumps(facts))

def maker(one) -> str:
    """The folder of the race that made a run."""
    return Path(one.hyperparameters.get("records", "").strip("'\"")).parent.name

def of_others(runs: dict, candidate: trial.Entry) -> list:
    """The runs of a baseline that another race made than those of the candidate."""
    own = {*map(maker, candidate.done.values())}
    return [one for one in runs.values() if own and maker(one) not in own]

def rescale(runs: dict, again: dict, candidate: trial.Entry) -> float:
    """Gives kept runs the times that they would have today, by those that were made again; how
    much longer they are."""
    factor = fmean(one.seconds / runs[seed].lines[-1].seconds for seed, one in again.items())
    for one in of_others(runs, candidate):
        one.seconds = one.lines[-1].seconds * factor
        one.clock = tuple(x * factor for x in logs.clock_beside(one.path) or ()) or None
    return factor
