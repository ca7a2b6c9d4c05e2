"""Write the log of a run into a tracker, or as JSON lines or CSV: afterwards, or while it trains.

    python records/export.py records/demo --to csv --out demo.csv
    python records/export.py records/demo --to tensorboard --out runs
    python records/export.py RUN --to wandb --project speedrun --follow

RUN is a run's log, its folder, or a folder of logs, of this project or published by the speedrun
(see compare.py); of a run that was killed, or is alive, what the log holds so far is written. A
resumed run is written whole, with the steps of the logs that it continues, under the name of the
newest one. jsonl and csv go to stdout, or to --out, a new file. A tracker gets a run of that name,
with hyperparameters and environment as its configuration, and at each step train_loss, val_loss and
what else the log says. Where a step was trained and validated, the rest is the training's.

  tensorboard  a folder for each log in --out (default: runs), where a second export replaces the
               first; its relative time is the training time
  trackio      into --project, in --out (default: where trackio keeps all)
  wandb        into --project; files in --out (default: ./wandb), until `wandb sync` with
               WANDB_MODE=offline

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
import os
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
    def __init__(self, args, runs):
        self.file = sys.stdout
        if args.out:
            self.file = open(args.out, "x", 1, encoding="utf-8", errors="backslashreplace")

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
    def __init__(self, args, runs):
        super().__init__(args, runs)
        columns = dict.fromkeys(name for run in runs for name in flat_settings(run))
        self.writer = csv.DictWriter(self.file, ["run", *logs.Line._fields, *columns],
                                     lineterminator="\n")
        self.writer.writeheader()

    def start(self, run):
        self.settings = flat_settings(run)

    def write(self, row: dict):
        self.writer.writerow(row | self.settings)

class Tracker:
    def __init__(self, args, runs):
        self.args = args

    def start(self, run):
        self.step = None  # the last one
        if self.args.out:
            self.args.out.mkdir(parents=True, exist_ok=True)
        try:
            self.run = self.begin(run)
        except ImportError as e:
            raise UserError(f"--to {self.args.to}: pip install {self.args.to} ({e})") from None
        except Exception as e:  # no account, no network, a name that it does not take
            raise UserError(f"{type(e).__name__}: {e}".splitlines()[0]) from None

    def add(self, run, line):
        values = {}
        if line.kind:
            values[f"{line.kind}_loss"] = math.nan if line.loss is None else line.loss
        if line.step != self.step:
            measured = zip(line._fields[4:], line[4:])
            values |= {name: value for name, value in measured if value is not None}
        self.step = line.step
        self.log(values, line)

    def log(self, values: dict, line):
        self.run.log(values, step=line.step)

    def finish(self):
        self.run.finish()

    def named(self, run) -> dict:
        """What wandb and trackio, which has its interface, are told of a run."""
        settings = settings_of(run)
        config = settings.pop("hyperparameters") | settings
        return {"project": self.args.project, "name": run.name, "config": config}

class Trackio(Tracker):
    def begin(self, run):
        if self.args.out:
            os.environ["TRACKIO_DIR"] = str(self.args.out)  # which the import reads
        import trackio
        return trackio.init(auto_log_gpu=False, auto_log_cpu=False, **self.named(run))

class Wandb(Tracker):
    def begin(self, run):
        import wandb
        # No measurements, packages or git state of here, where the run need not have been.
        settings = wandb.Settings(console="off", disable_git=True, disable_code=True,
                                  x_disable_stats=True, x_disable_meta=True,
                                  x_save_requirements=False)
        return wandb.init(dir=self.args.out, settings=settings, **self.named(run))

class TensorBoard(Tracker):
    def begin(self, run):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self.event = Event
        writer = EventFileWriter(str((self.args.out or Path("runs")) / run.name), flush_secs=1)
        # At a START TensorBoard forgets what it has of this run from that step on.
        writer.add_event(Event(step=0, session_log={"status": "START"}))
        settings = {name: value if isinstance(value, (int, float, str)) else str(value)
                    for name, value in flat_settings(run).items()}
        writer.add_event(Event(step=0, summary=hparams_pb(settings, trial_id=run.name)))
        return writer

    def log(self, values: dict, line):
        scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self.run.add_event(self.event(step=line.step, wall_time=line.seconds,
                                      summary={"value": scalars}))

    def finish(self):
        self.run.close()

TARGETS = {"jsonl": JsonLines, "csv": Csv, "tensorboard": TensorBoard, "trackio": Trackio,
           "wandb": Wandb}

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
    parser.add_argument("--project", default="nanogpt-speedrun",
                        help="of wandb or trackio; default: nanogpt-speedrun")
    parser.add_argument("--follow", action="store_true", help="go on until the run's end or Ctrl+C")
    args = parser.parse_args()
    beside = {run: Path(f"{Path(run)}.log") for run in args.runs}  # of a run's folder, its log
    runs, unread = logs.read(log if log.is_file() else run for run, log in beside.items())
    for line in unread:
        print(line, file=sys.stderr)
    require(runs, "no run to export")
    require(not args.follow or len(runs) == 1, f"--follow takes one run, not {len(runs)}")
    sys.stdout.reconfigure(line_buffering=True)
    target = TARGETS[args.to](args, runs)
    for run in runs:
        export(run, target, args.follow)
    if unread:
        sys.exit(1)

if __name__ == "__main__":
    sys.exit(common.run(main, errors=(logs.BadInput,)))
