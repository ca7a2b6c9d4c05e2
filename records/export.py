"""Write the log of a run as JSON lines, CSV or TensorBoard's events, afterwards or while it trains.

    python records/export.py records/demo --to csv --out demo.csv
    python records/export.py records/demo --to tensorboard --out runs
    python records/export.py RUN --to tensorboard --follow

RUN is a run's log, its folder, or a folder of logs, of this project or published by the speedrun
(see compare.py); of a run that was killed, or is alive, what the log holds so far is written. A
resumed run is written whole, with the steps of the logs that it continues, under the name of the
newest one. jsonl and csv go to stdout, or to --out, a new file.

tensorboard writes a folder for each run into --out (default: runs), where a second export replaces
the first. It has the settings as hyperparameters, and at each step train_loss, val_loss and what
else the log says; where a step was trained and validated, the rest is the training's. Its relative
time is the training time.

--follow looks every second for new lines, of one run, until its last validation or Ctrl+C. A run
that is resumed goes on in another log: follow that one.

JSON lines, version 1, numbers as numbers, null for what the log does not say:
  first of a run: kind "run", version, run (its name), path, hyperparameters, environment (both as
    the newest log has them), changed (settings, on resuming), mixed (in what else the logs of a
    resumed run differ: script, ranks, host, torch)
  one for each line of a step: run, step, total (steps to do), kind ("train", "val", or null where
    no loss is given), loss (nats a token; null where not finite), seconds (of training),
    ms_per_step (mean so far), tokens (trained on), lr (factor of the learning rates), window (of
    attention, in tokens)
CSV has the latter as columns, then hyperparameters.NAME, environment.NAME, changed and mixed, the
same in all rows of a run.
"""

import ast
import csv
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records import logs

with logs.installed():
    from data import common
    from data.common import UserError, require

def value_of(text: str):
    """A logged setting as JSON has it: a number, boolean, list or text."""
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text

def settings_of(run) -> dict:
    values = {name: value_of(text) for name, text in run.hyperparameters.items()}
    return {"hyperparameters": values, "environment": run.environment, "changed": run.changed,
            "mixed": run.mixed}

def flat_settings(run) -> dict:
    """The same by names of one level."""
    settings = settings_of(run)
    found = {f"{kind}.{name}": value for kind in ("hyperparameters", "environment")
             for name, value in settings[kind].items()}
    return found | {name: "; ".join(settings[name]) for name in ("changed", "mixed")}

# What runs are written to, one after the other: start, add for each line, finish.

class JsonLines:
    def __init__(self, out, runs):
        self.file = sys.stdout
        if out:
            self.file = open(out, "x", 1, encoding="utf-8", errors="backslashreplace")

    def start(self, run):
        self.write({"kind": "run", "version": 1, "run": run.name, "path": run.path}
                   | settings_of(run))

    def add(self, run, line):
        self.write({"run": run.name} | line._asdict())

    def write(self, row: dict):
        print(json.dumps(row, allow_nan=False), file=self.file)

    def finish(self):
        pass

class Csv(JsonLines):
    def __init__(self, out, runs):
        super().__init__(out, runs)
        columns = dict.fromkeys(name for run in runs for name in flat_settings(run))
        self.writer = csv.DictWriter(self.file, ["run", *logs.Line._fields, *columns],
                                     lineterminator="\n")
        self.writer.writeheader()

    def start(self, run):
        self.settings = flat_settings(run)

    def write(self, row: dict):
        self.writer.writerow(row | self.settings)

class TensorBoard:
    def __init__(self, out, runs):
        try:
            from torch.utils.tensorboard import SummaryWriter, summary
        except ImportError as e:
            raise UserError(f"--to tensorboard: pip install tensorboard ({e})") from None
        self.new_writer = SummaryWriter
        self.hparams = summary.hparams
        self.out = out or Path("runs")

    def start(self, run):
        self.step = None  # the last one
        # With purge_step=0 TensorBoard forgets what it has of this run.
        self.writer = self.new_writer(str(self.out / run.name), purge_step=0, flush_secs=1)
        settings = {name: value if isinstance(value, (int, float, str)) else str(value)
                    for name, value in flat_settings(run).items()}
        for part in self.hparams(settings, {}):  # add_hparams() would open a file of its own
            self.writer.file_writer.add_summary(part)

    def add(self, run, line):
        values = {}
        if line.kind:
            values[f"{line.kind}_loss"] = math.nan if line.loss is None else line.loss
        if line.step != self.step:
            values |= dict(zip(line._fields[4:], line[4:]))
        self.step = line.step
        for name, value in values.items():
            if value is not None:
                self.writer.add_scalar(name, value, line.step, walltime=line.seconds)

    def finish(self):
        self.writer.close()

TARGETS = {"jsonl": JsonLines, "csv": Csv, "tensorboard": TensorBoard}

def export(run, target, follow: bool):
    """Write what the log of a run holds; with follow, until the run has ended."""
    target.start(run)
    written = 0  # lines
    try:
        while True:
            for line in run.lines[written:]:
                target.add(run, line)
            written = len(run.lines)
            if run.finished or not follow:
                return
            time.sleep(1)
            run = logs.read_run(run.path, run.name, [path for path, _ in run.logs])
    finally:
        target.finish()

def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a log, or a folder")
    parser.add_argument("--to", required=True, choices=TARGETS)
    parser.add_argument("--out", type=Path, metavar="PATH", help="file or folder, see above")
    parser.add_argument("--follow", action="store_true", help="go on until the run's end or Ctrl+C")
    args = parser.parse_args()
    beside = {run: Path(f"{Path(run)}.log") for run in args.runs}  # of a run's folder, its log
    runs, unread = logs.read(log if log.is_file() else run for run, log in beside.items())
    for line in unread:
        print(line, file=sys.stderr)
    require(runs, "no run to export")
    require(not args.follow or len(runs) == 1, f"--follow takes one run, not {len(runs)}")
    sys.stdout.reconfigure(line_buffering=True)
    target = TARGETS[args.to](args.out, runs)
    for run in runs:
        export(run, target, args.follow)
    if unread:
        sys.exit(1)

if __name__ == "__main__":
    sys.exit(common.run(main, errors=(logs.BadInput,)))
