"""Nothing may need what Windows lacks, as far as that shows on Linux: by the sources' syntax trees,
and by runs that get no more than Windows has."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT, TINY, log_path

PROGRAMS = [ROOT / "train_gpt.py", *ROOT.glob("records/*.py"), *ROOT.glob("data/*.py")]
MODULES = """_curses _posixsubprocess crypt curses fcntl grp nis posix pty pwd readline resource
    spwd syslog termios triton tty""".split()
NAMES = {f"{module}.{name}" for module, names in {
    "mmap": "MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "os": """O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOFOLLOW O_NONBLOCK O_SYNC RTLD_GLOBAL
        WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG chown chroot confstr copy_file_range
        ctermid environb eventfd fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs
        fwalk get_blocking getegid getenvb geteuid getgid getgrouplist getgroups getloadavg getpgid
        getpgrp getpriority getrandom getresgid getresuid getsid getuid getxattr initgroups killpg
        lchown listxattr lockf login_tty major makedev memfd_create minor mkfifo mknod nice openpty
        pathconf pidfd_open pipe2 posix_fadvise posix_fallocate posix_openpt posix_spawn
        posix_spawnp pread preadv ptsname pwrite pwritev readv register_at_fork removexattr
        sched_getaffinity sched_getscheduler sched_param sched_setaffinity sched_setscheduler
        sched_yield sendfile set_blocking setegid seteuid setgid setgroups setns setpgid setpgrp
        setpriority setregid setresgid setresuid setreuid setsid setuid setxattr splice statvfs
        sync sysconf tcgetpgrp tcsetpgrp ttyname uname unshare wait wait3 wait4 waitid writev""",
    "select": "epoll poll",
    "signal": """ITIMER_REAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF
        SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM
        SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause
        pidfd_send_signal pthread_kill pthread_sigmask setitimer siginterrupt sigpending
        sigtimedwait sigwait sigwaitinfo""",
    "socket": "AF_UNIX",
    "time": "clock_getres clock_gettime clock_gettime_ns clock_settime pthread_getcpuclockid tzset",
}.items() for name in names.split()}


def guarded(tree) -> set:
    """The nodes below a test for what there is, or in a try that bears its absence."""
    nodes = set()
    for node in ast.walk(tree):
        tests = isinstance(node, (ast.If, ast.IfExp)) and re.search(
            r"\bhasattr\((os|signal|time), |\bsys\.platform\b|\bos\.name\b", ast.unparse(node.test))
        bears = isinstance(node, ast.Try) and any(
            re.search("ImportError|AttributeError", ast.unparse(handler.type or ast.Name("")))
            for handler in node.handlers)
        if tests or bears:
            nodes.update(ast.walk(node))
    return nodes


def lacking(source: str) -> list[str]:
    """What a source uses, unguarded, that Windows lacks."""
    tree = ast.parse(source)
    modules = []
    names = []
    for node in set(ast.walk(tree)) - guarded(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    return ([module for module in modules if module.split(".")[0] in MODULES]
            + [name for name in names if name in NAMES])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_the_sources_name_nothing_that_windows_lacks(path):
    assert lacking(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", [
    "import fcntl", "import os, resource as r", "from pwd import getpwnam", "os.fork()",
    "def f():\n    import termios", "signal.signal(signal.SIGHUP, f)", "from signal import SIGKILL",
    "os.sync()", "os.uname().nodename", "if x:\n    len(os.sched_getaffinity(0))",
    "if hasattr(hp, name):\n    os.wait()",
])
def test_the_search_finds_a_use(line):
    assert lacking(line)


@pytest.mark.parametrize("line", [
    "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", "os.fsync(3)", "os.read(0, 9)",
    "if hasattr(os, 'sync'):\n    os.sync()", "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
    "n = len(os.sched_getaffinity(0)) if sys.platform == 'linux' else 1", "os.O_RDONLY", "os.write",
])
def test_the_search_allows(line):
    assert lacking(line) == []


# Runs a program twice: to import what others wrote, then as its __main__ with less. A file that is
# open or mapped can be neither replaced nor removed; this comes first, for shutil to see it.
HIDE = f"""
import os, runpy, sys

def held(path):
    path = os.path.realpath(path)
    opened = [os.path.realpath("/proc/self/fd/" + number) for number in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps", "rb") as maps:
        return path in opened or os.fsencode(path) in maps.read()

def replace_by_strict(name):
    original = getattr(os, name)

    def strict(*paths, **kwargs):
        for path in paths:
            if held(path):
                raise PermissionError(13, "is open", os.fspath(path))
        return original(*paths, **kwargs)
    setattr(os, name, strict)

for name in ("remove", "rename", "replace", "unlink"):
    replace_by_strict(name)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="imported")
for name in [name for name in sys.modules if name.split(".")[0] in ("data", "records")]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys({MODULES}))
sys.platform = "win32"
for name in {sorted(NAMES)}:
    module, name = name.split(".")
    if hasattr(__import__(module), name):
        delattr(__import__(module), name)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# No grep, no git, and texts that name no encoding are neither written nor read in UTF-8.
BARE = ENVIRONMENT | {"PATH": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
                      "PYTHONIOENCODING": "cp1252:strict"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="hides what only Linux has")


def start_hidden(folder, program, *flags) -> subprocess.CompletedProcess:
    hide = folder / "hide.py"
    hide.write_text(HIDE, encoding="utf-8")
    return subprocess.run([sys.executable, str(hide), str(program), *map(str, flags)], cwd=folder,
                          env=BARE, capture_output=True, text=True, timeout=280)


def run_hidden(*args) -> str:
    done = start_hidden(*args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_script(folder):
    """With the line ends that git gives it on Windows, and a letter that is not in ASCII."""
    path = folder / "copied.py"
    text = (ROOT / "train_gpt.py").read_text(encoding="utf-8") + "# \u0416\n"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    return path


@linux
def test_data_to_sample_with_what_windows_has(tmp_path, text):
    """Shards, a run of 3 steps, its resumption to 6, and a sample."""
    (tmp_path / "text.txt").write_bytes(text)
    (tmp_path / "d").mkdir()
    run_hidden(tmp_path, ROOT / "data" / "tokenize_text.py", "text.txt", "--name=t", "--workers=1",
               "--out=d", "--tokenizer=bytes", "--val_fraction=0.2")
    made = sorted(child.name for child in (tmp_path / "d").iterdir())
    assert made == ["t.json", "t_train_000001.bin", "t_val_000000.bin"]
    shards = ["--train_files=d/t_train_*.bin", "--val_files=d/t_val_*.bin", "--save_every=1"]
    assert "documents begin here" in run_hidden(tmp_path, ROOT / "data" / "inspect_shards.py",
                                                "d/t_train_000001.bin", "d/t_val_000000.bin")
    script = copy_of_the_script(tmp_path)
    run_hidden(tmp_path, script, *TINY, "--num_iterations=3", *shards)
    path = log_path(tmp_path / "records")
    run_hidden(tmp_path, script, f"--resume={path}", "--num_iterations=6")
    log = path.read_bytes().decode()
    assert "\u0416" in log and "\r" not in log
    assert re.findall("(?m)^changed: .*", log) == ["changed: num_iterations was 3 and is 6"]
    names = [child.name for child in tmp_path.rglob("*")]
    assert [name for name in names if re.search(r'[<>:"|?*\\]|[. ]$', name)] == []
    kept = sorted(child.name for child in path.with_suffix("").iterdir())
    assert kept == ["step00000005.pt", "step00000006.pt"]
    assert run_hidden(tmp_path, ROOT / "records" / "sample.py", path, "--script", script,
                      "--tokens=2", "--prompt=def ").startswith("def ")


@linux
def test_no_more_workers_than_windows_takes(tmp_path):
    done = start_hidden(tmp_path, ROOT / "data" / "tokenize_text.py", "text.txt", "--name=t",
                        "--workers=62", "--out=d", "--tokenizer=bytes")
    assert done.returncode == 2 and "--workers 62: must be 1 to 61" in done.stderr


@linux
@pytest.mark.parametrize("program", ["records/compare.py", "records/hellaswag.py",
                                     "data/fineweb.py"])
def test_the_other_programs_start_with_what_windows_has(program, tmp_path):
    assert "usage: " in run_hidden(tmp_path, ROOT / program, "--help")


@linux
@pytest.mark.parametrize("line, said", [
    ("import fcntl", "import of fcntl halted"),
    ("import os; os.sched_getaffinity(0)", "no attribute 'sched_getaffinity'"),
    ("import signal; signal.SIGHUP", "no attribute 'SIGHUP'"),
    ("import os; f = open('f', 'w'); os.replace('f', 'g')", "is open"),
    ("from pathlib import Path; Path(__file__).read_text()  # \u0416", "'ascii' codec"),
    ("print('\u0416')", "'charmap' codec"),
    ("import subprocess; subprocess.run(['grep', 'x', __file__])", "No such file"),
])
def test_a_program_that_uses_more_fails(line, said, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(line, encoding="utf-8")
    done = start_hidden(tmp_path, program)
    assert done.returncode == 1 and said in done.stderr
