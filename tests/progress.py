"""What a person sees while the tests run: how many processes test and for how long, the time that
is left, and what fails, at once. A plugin of pytest, which conftest.py registers.

tests/times.json holds the seconds that each test took on one machine, which it names;
`./run.sh test --all --record-times` writes it anew. Tests start in the order of these times, the
slowest first, so that no process is left alone with a slow one at the end."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

TIMES = Path(__file__).parent / "times.json"
LEFT_OUT = pytest.StashKey[int]()  # how many tests of full size are left for --all
USUAL = 0.1  # seconds, of a test that the file does not know
HANGS = 60 * float(os.environ.get("TEST_HANGS_AFTER", 20))  # seconds; the slowest takes 1 % of it
EVERY = 1 if sys.stdout.isatty() else 15  # seconds between two lines about the time that is left

def idle_cores(watched: float = 0.5) -> int:
    """How many cores of this machine were free while they were watched: at least one, and at most
    as many as this process may use."""
    def idle_ticks():
        return int(Path("/proc/stat").read_text().split()[4])  # of all cores together

    if not os.path.exists("/proc/stat"):
        return os.cpu_count() or 1
    before = idle_ticks()
    time.sleep(watched)
    free = (idle_ticks() - before) / os.sysconf("SC_CLK_TCK") / watched
    return max(1, min(len(os.sched_getaffinity(0)), round(free)))

def minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    return f"{round(seconds / 60)} minutes"

class Watchdog:
    """Ends this process where a test hangs, after a line that names the test."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        timer = threading.Timer(HANGS, self.end, [item.nodeid])
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()

    def end(self, name):
        self.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
        print(f"\n{name} has not ended after {HANGS / 60:g} minutes, so it is stopped",
              file=sys.stderr, flush=True)
        subprocess.run(["pkill", "-KILL", "-P", str(os.getpid())], check=False)
        os._exit(1)

class SlowestFirst:
    """In each process of xdist, which hands out tests in this order."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        known = json.loads(TIMES.read_text())["tests"]
        items.sort(key=lambda item: -known.get(item.nodeid, USUAL))

    def pytest_sessionfinish(self, session):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)

class Progress:
    """In the process that a person watches."""

    def __init__(self, config):
        self.config = config
        self.known = json.loads(TIMES.read_text())
        self.tests = {}  # by name, whether it has ended
        self.took = Counter()
        self.said = time.monotonic()

    def write(self, line, **markup):
        self.config.pluginmanager.getplugin("terminalreporter").ensure_newline()
        self.config.get_terminal_writer().line(line, **markup)
        self.config.get_terminal_writer().flush()

    @property
    def processes(self):
        return self.config.getoption("numprocesses", None) or 1

    def pytest_sessionstart(self):
        option = self.config.option
        known = self.known["minutes"]
        chosen = "quick" if option.markexpr == "quick" else "all" if option.all else "plain"
        some = option.keyword or option.script or option.markexpr not in ("", "quick") or any(
            Path(word).resolve() != TIMES.parent for word in self.config.args)
        takes = "" if some or chosen not in known else (
            f"; two processes take {minutes(60 * known[chosen])} on {self.known['machine']}")
        count = self.processes
        self.write(f"{count} process{'es test' if count > 1 else ' tests'}{takes}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.expect(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.expect(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        if hasattr(node, "workeroutput"):
            self.config.stash[LEFT_OUT] = node.workeroutput["left_out"]

    def expect(self, names):
        self.tests = {name: self.tests.get(name, False) for name in names}

    def pytest_runtest_logreport(self, report):
        self.took[report.nodeid] += report.duration
        if report.failed:
            where = "" if report.when == "call" else f" - in its {report.when}"
            self.write(f"FAILED {report.nodeid}{where}", red=True)
        if report.when == "teardown":
            self.tests[report.nodeid] = True
            if sum(self.tests.values()) >= 2 and time.monotonic() - self.said >= EVERY:
                self.said = time.monotonic()
                self.say_what_is_left()

    def say_what_is_left(self):
        """By the speed of this machine so far, in relation to that of the file."""
        done = [name for name, ended in self.tests.items() if ended]
        expected = {name: self.known["tests"].get(name, USUAL) for name in self.tests}
        speed = sum(self.took[name] for name in done) / sum(expected[name] for name in done)
        rest = sum(expected.values()) - sum(expected[name] for name in done)
        line = (f"{len(done)} of {len(self.tests)} tests are done, about "
                f"{minutes(rest * speed / self.processes)} are left")
        writer = self.config.get_terminal_writer()
        if sys.stdout.isatty():
            writer.write(f"\r{line:<70}", flush=True)
        else:
            self.write(line)

    def pytest_sessionfinish(self, session):
        if self.config.option.record_times:
            self.known["tests"] = {name: round(self.took[name], 1) for name in sorted(self.tests)
                                   if self.took[name] >= 0.3}
            TIMES.write_text(json.dumps(self.known, indent=1) + "\n")

    def pytest_unconfigure(self):
        """After all that pytest itself has to say."""
        if left_out := self.config.stash.get(LEFT_OUT, 0):
            self.write(f"{left_out} tests of full size were left out: ./run.sh test --all")

    def pytest_report_teststatus(self, report):
        """No letters: the lines above say what there is to say."""
        if report.failed:
            return ("failed" if report.when == "call" else "error"), "", "FAILED"
        if report.skipped:
            return "skipped", "", "SKIPPED"
        if report.when == "call":
            return "passed", "", "PASSED"
