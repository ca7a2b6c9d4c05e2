"""tools/launch.py by its functions, and in real starts by run.sh."""

import os
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
import pytest
import torch
from conftest import ROOT, TINY, edited, log_path, losses, refused, run_sh, train
import train_gpt
from data import tokenize_text
from data.common import UserError
from records.tools import judge, launch, load

@pytest.fixture
def started(monkeypatch):
    commands = []
    monkeypatch.setattr(launch, "start", lambda *command, **more: commands.append(command))
    return commands

@pytest.mark.parametrize("words, path, flags", [
    ("", None, ""), ("--seed=1 demo", None, "--preset=demo --seed=1"),
    ("--seed 1 speedrun my.py --check", "my.py", "--preset=speedrun --seed 1 --check"),
    ("--name demo my.py", "my.py", "--name demo"),  # the value of a flag
    ("--resume", None, "--resume="), ("--resume my.py --seed=1", "my.py", "--resume= --seed=1"),
    ("my.py --resume records/a.log", "my.py", "--resume=records/a.log")])
def test_script_and_preset_may_stand_anywhere(words, path, flags):
    assert launch.split_words(words.split()) == (path, flags.split())

@pytest.mark.parametrize("quota, cores", [
    (None, 6), ("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1)])
def test_ranks_fill_the_cores_and_divide_the_micro_batches(quota, cores, tmp_path, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    monkeypatch.setattr(launch, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota:
        launch.CPU_QUOTA.write_text(f"{quota}\n")
    assert launch.cores() == launch.number_of_ranks(60, 0) == cores
    assert launch.number_of_ranks(7, 0) == 1
    assert [launch.number_of_ranks(8, gpus) for gpus in (1, 3, 8)] == [1, 2, 8]
    monkeypatch.setenv("NPROC", "64")  # of a shell that uses it for make
    with refused("NPROC=64 processes cannot share 8 micro-batches equally: unset NPROC", UserError):
        launch.number_of_ranks(8, 0)

@pytest.mark.parametrize("wanted, ranks, threads", [
    (None, 2, "1"), ("8", 6, "1"), ("8", 2, "3"), ("2", 2, "2"), ("0", 3, "2"), ("4,2", 1, "6")])
def test_threads_are_at_most_the_cores_left(wanted, ranks, threads, monkeypatch, capsys):
    monkeypatch.setattr(launch, "cores", lambda: 6)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": wanted} if wanted else {})
    launch.prepare_cpu(ranks)
    assert os.environ["OMP_NUM_THREADS"] == threads
    said = f"run.sh: OMP_NUM_THREADS={threads} in place of {wanted}: {ranks} rank(s) share 6 "
    assert capsys.readouterr().out == f"{said}core(s)\n" * (wanted not in (None, threads))

@pytest.mark.parametrize("chosen, cores, gpus, workers", [
    (None, 16, 8, "2"), (None, 4, 8, "1"), (None, 128, 3, "32"), ("5", 16, 8, "5")])
def test_compilers_share_the_cores(chosen, cores, gpus, workers, started, monkeypatch, capsys):
    """Each rank alone would start up to 32 processes. GPUs that stay idle are said."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launch, "cores", lambda: cores)
    environment = dict(TORCHINDUCTOR_COMPILE_THREADS=chosen) if chosen else {}
    monkeypatch.setattr(os, "environ", environment)
    launch.main(["speedrun", "--check"])
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == workers and len(started) == 2
    assert ("2 rank(s) on 2 of 3 GPUs (--mi" in capsys.readouterr().out) == (gpus == 3)

def test_a_race_validates_where_its_verdict_reads_the_curve(started, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "environ", {})
    for words, spacing in (("", 399), ("--num_iterations=60", 14), ("--val_loss_every=9", 9)):
        launch.main(f"speedrun --check --curve {words}".split())
        assert f"--val_loss_every={spacing}" in started[-1]
        steps = 60 if "60" in words else 1770
        assert steps // 2 < int(started[-1][-1].removeprefix("--save_every=")) <= steps - 8
    for end in range(1, 2000):
        steps = [*range(0, end, launch.validation_spacing(end)), end]
        later = judge.steps_later([(step, 9 - step / end) for step in steps], -0.9)
        assert later == pytest.approx(-0.9 * end) and len(steps) < 21

@pytest.mark.parametrize("ranks, gpus, words", [
    (8, 8, ""), (1, 0, ""),
    (2, 3, " on 2 of 3 GPUs (--micro_batches=12 --train_seq_len=32768 would use all)"),
    (4, 6, " on 4 of 6 GPUs (--micro_batches=12 --train_seq_len=32768 would use all)"),
    (8, 16, " on 8 of 16 GPUs (--micro_batches=16 --train_seq_len=24576 would use all)"),
    (4, 5, " on 4 of 5 GPUs")])
def test_idle_gpus_are_said_with_the_flags_that_use_all(ranks, gpus, words, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    hp = train_gpt.PRESETS["speedrun"]
    assert launch.number_of_ranks(hp.micro_batches, gpus) == ranks or not gpus
    assert launch.idle_gpus(ranks, gpus, hp.tokens_per_step, hp.micro_batches) == words
    monkeypatch.setenv("NPROC", str(ranks))  # the user has chosen
    assert launch.idle_gpus(ranks, gpus, hp.tokens_per_step, hp.micro_batches) == ""

def test_a_driver_in_vain_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")  # a user's own stays
    monkeypatch.setattr(launch, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch.prepare_cpu(1)
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "7" and "MALLOC_MMAP_THRESHOLD_" in os.environ
    launch.NVIDIA_DRIVER.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03\n")
    with pytest.raises(UserError, match=r"torch \d\S+ sees no GPU with NVIDIA driver 535\.54\.03"):
        launch.prepare_cpu(1)

@pytest.mark.parametrize("words, message", [
    ("fast", "invalid choice: 'fast'"),
    ("demo speedrun", "demo and speedrun: name one script and one preset"),
    ("demo --repeat=2 --seed=1", "--repeat=2: takes a number above 0, and neither --seed nor"),
    ("speedrun", "speedrun takes weeks without a GPU; run demo"),
    ("no_such.py demo", "no_such.py: there is no such script"),
    ("data/common.py demo", "is no copy of train_gpt.py, because it has no GPT, parse_flags, ch"),
    ("demo --records=README.md/x", "--records=README.md/x cannot hold logs: README.md is no "),
    ("demo --check", "NPROC=0 is not a number above 0"),
    ("demo --check", "srun has started 8 run.sh, which do not know of each other"),
    ("speedrun --text=README.md", "--text=README.md: trains the demo"),
    ("demo --vocab_size=257", "--vocab_size=257: that is not the demo's; name shards of your own"),
    ("demo --vocab_size=257 --text=README.md", "--vocab_size=257: that is not the demo's; name"),
    ("--text=no_such.txt", "no_such.txt: no such file or folder"),
    ("--resume=no_such.pt", "no_such.pt: there is no such run; name its log, its folder or a"),
    ("--resume=tests", "tests: has no checkpoint")])
def test_what_a_user_can_fix_is_one_line_at_once(words, message, started, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NPROC", "0" if "NPROC" in message else "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")  # of a shell of salloc, which is one process
    if "srun" in message:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UserError) as caught:
        launch.main(words.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not started

def test_a_run_is_resumed_by_any_of_its_names(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, steps in (("older", 1), ("newer", 2)):
        train(train_gpt, *TINY, *shards, f"--name={steps}{name}", f"--num_iterations={steps}",
              "--micro_batches=3", "--save_every=1", "--records=records")
    (log,) = Path("records").glob("*newer.log")
    shutil.copy(train_gpt.__file__, "mine.py")
    checkpoint = log.with_suffix("") / "step00000002.pt"
    for run in (checkpoint, log, log.with_suffix(""), "records", ""):
        path, flags, settings = launch.find_resumed(None, [f"--resume={run}", "--seed=3"])
        assert (path, flags) == ("mine.py", ["--seed=3", f"--resume={checkpoint}"])
        assert settings["micro_batches"] == 3
        assert capsys.readouterr().out.endswith(f"run.sh: mine.py goes on from {checkpoint}\n")
    (log,) = Path("records").glob("*older.log")
    assert str(log)[:-4] in launch.find_resumed("other.py", [f"--resume={log}"])[1][0]
    (checkpoint.parent / "step_kept.pt").touch()  # somebody's copy
    with open(checkpoint.parent.with_suffix(".log")), refused(
            f"is still being written, by process {os.getpid()}: wait for its end", UserError):
        launch.find_resumed(None, ["--resume="])
    shutil.move("records", "elsewhere")
    assert launch.find_resumed(None, ["--records=elsewhere", "--resume="])[0] == "mine.py"

def test_a_script_in_another_encoding_is_one_line(tmp_path):
    path = tmp_path / "latin.py"
    path.write_bytes("# -*- coding: latin-1 -*-\n# caf\xe9\n".encode("latin-1"))
    with refused("latin.py: is no text in UTF-8 .*; save it as UTF-8", UserError):
        load.load_script(path)

def test_the_presets_get_the_data_that_they_need(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speedrun, short, demo = train_gpt.PRESETS.values()
    for hp in (speedrun, replace(speedrun, num_iterations=100), replace(speedrun, epochs=4), short):
        launch.make_preset_data(train_gpt, hp)
    launch.make_preset_data(train_gpt, replace(demo, train_files="data/mine/*.bin"))
    # 696 million tokens are in 7 chunks of 100 million, 39 million and 98 million in one.
    assert started == [("data/fineweb.py", f"--num_chunks={n}") for n in (7, 1, 2, 1)]
    launch.make_preset_data(train_gpt, demo)
    assert started.pop()[0] == "data/tokenize_text.py" and len(started) == 4

@pytest.fixture
def tokenizing(tmp_path, monkeypatch):
    """An empty folder, where `start` makes shards; the commands."""
    monkeypatch.chdir(tmp_path)
    commands = []
    def start(*command):
        commands.append(command)
        tokenize_text.main(command[1:])
    monkeypatch.setattr(launch, "start", start)
    return commands

@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "s.json").unlink(),
    lambda folder: (folder / "s_val_000000.bin").unlink(),
    lambda folder: os.truncate(folder / "s_train_000001.bin", 3000),
    lambda folder: train_gpt.np.memmap(folder / "s_train_000001.bin", mode="r+")[5000:].fill(0),
    lambda folder: shutil.copy(folder / "s.json", folder / "s_train_000002.bin"),
    lambda folder: (folder / "s.json").write_text(
        (folder / "s.json").read_text().replace('"shuffle": 768', '"shuffle": null')),
    lambda folder: (folder / "s.json").write_text(
        (folder / "s.json").read_text().replace('"python"', '"bytes"'))])
def test_what_was_made_here_and_is_damaged_is_made_again(damage, tokenizing, capsys):
    """Also a shard too many, on which a run would train as well."""
    Path("text.txt").write_text("to be or not to be " * 1000)
    words = ("d/s", "text.txt")
    launch.make_shards(*words)
    good = {path.name: path.read_bytes() for path in Path("d").iterdir()}
    Path("d/other.bin").touch()
    launch.make_shards(*words)
    assert len(tokenizing) == 1 and "again" not in capsys.readouterr().out
    damage(Path("d"))
    launch.make_shards(*words)
    assert len(tokenizing) == 2 and "run.sh: d/s*: files are missing, damaged or of " in (
        capsys.readouterr().out)
    assert {path.name: path.read_bytes() for path in Path("d").iterdir()} == {
        **good, "other.bin": b""}

def test_a_second_start_waits_for_what_the_first_one_makes(tokenizing, monkeypatch, capsys):
    Path("text.txt").write_text("to be or not to be " * 1000)
    make = launch.start
    monkeypatch.setattr(launch, "start",
                        lambda *words: (second.start(), time.sleep(1), make(*words)))
    second = threading.Thread(target=lambda: made.append(launch.make_shards("d/s", "text.txt")))
    made = []
    assert launch.make_shards("d/s", "text.txt")
    second.join()
    assert made == [False] and len(tokenizing) == 1
    assert "note: another program makes files in d; this one waits" in capsys.readouterr().err

def test_a_text_is_tokenized_once_and_again_when_it_has_changed(tokenizing, capsys):
    text = Path("my texts", "demo.txt")
    text.parent.mkdir()
    text.write_text("to be or not to be " * 1000)
    hp = replace(train_gpt.PRESETS["demo"], num_iterations=10)  # 40,960 tokens
    def flags(text, **named):
        return launch.flags_for_text(str(text), train_gpt, hp, named)
    first = flags(text)
    assert re.fullmatch(r"--train_files=(data/texts/demo_\w+)_train_\*\.bin --val_files=\1"
                        r"_val_\*\.bin --epochs=100000 --val_tokens=0", " ".join(first))
    assert ("5709 training tokens, 7.2 passes over them; 302 validation tokens\n"
            in capsys.readouterr().out)
    assert flags(text) == first and len(tokenizing) == 1
    assert flags(text, epochs=3, val_tokens=9) == first[:2]
    facts = text.stat()
    text.write_text("to be or not to be " * 999 + "not to be or to be ")
    os.utime(text, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert text.stat().st_size == facts.st_size
    assert flags(text) != first and len(tokenizing) == 2, "its name, size and time are the same"
    text.write_text("to be or not to be " * 1000)
    assert flags(text) == first and len(tokenizing) == 2, "as it was"
    digests = iter(["before", "after"])
    with (pytest.MonkeyPatch.context() as patch,
          refused("my texts/demo.txt was changed while it was read: give the", UserError)):
        patch.setattr(launch, "digest_of", lambda *_: next(digests))
        flags(text)
    assert not Path("data/texts/demo_before.json").exists()
    assert flags(text.parent)[0].startswith("--train_files=data/texts/my_texts_")
    hp = replace(hp, val_tokens=300)
    assert flags(text)[2:] == ["--epochs=100000"]
    hp = replace(hp, micro_batches=40)
    with pytest.raises(UserError, match="5709 training tokens are too few for steps of"):
        flags(text)

@pytest.mark.parametrize("name, saved, words", [
    (b"run", 10, "run.sh: what the model writes after step 10 of 720:"),
    (b"run", None, "run.sh: no sample: "), (b"caf\xe9", 10, "run.sh: no sample: 'utf-8' codec ")])
def test_after_a_full_disk_the_sample_says_its_step(name, saved, words, started, tmp_path, capsys):
    """Where torch cannot read the checkpoint's path, there is none."""
    log = tmp_path / os.fsdecode(name + b".log")
    log.with_suffix("").mkdir()
    if saved:
        (log.with_suffix("") / f"step{saved:08}.pt").touch()
    launch.show_sample("mine.py", log, train_gpt.PRESETS["demo"], ["--prompt=def"])
    out = capsys.readouterr().out
    assert out.startswith(words) and len(started) == ("no sample" not in words)
    assert ("next, a race of a copy that you change: ./run.sh race mine.py" in out) == len(started)

def test_the_end_of_a_demo_stands_beside_the_committed_runs(tmp_path, capsys):
    log = sorted(launch.DEMO_RUNS.glob("*.log"))[0]
    (cut := tmp_path / "cut.log").write_text(log.read_text().partition("\nstep:")[0])
    (short := tmp_path / "short.log").write_text(log.read_text().replace("/720 ", "/719 "))
    for path, words in ((log, r"token; the runs in \S+ ended between 2\.\d{4} and 2\.\d{4}\n"),
                        (cut, "^$"), (short, "had another number of steps")):
        launch.compare_with_committed(path)
        assert re.search(words, capsys.readouterr().out)

def test_a_copy_is_checked_trained_on_two_processes_and_sampled_from(tmp_path, shards):
    """With odd names, a tilde after `=`, and a console that cannot show them."""
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "start").symlink_to(ROOT / "run.sh")
    copy = edited(tmp_path / "my record.py", "«F.relu→F.silu»")
    flags = [*TINY[1:], *shards, "--num_iterations=2", "--records=~/\u0434\u0430\u043d"]
    done = run_sh(str(copy), *flags, "demo", NPROC="2", HOME=str(tmp_path), OMP_NUM_THREADS="64",
                  PYTHONIOENCODING="latin-1", PYTHON=sys.executable,
                  run=tmp_path / "a folder" / "start")
    assert done.returncode == 0, done.stdout + done.stderr
    log = log_path(tmp_path / "\u0434\u0430\u043d")
    assert f"run.sh: using {sys.executable} (Python 3." in done.stderr
    assert f"python '{copy}' --check --preset=demo" in done.stdout
    assert ("-m torch.distributed.run --standalone --local_addr=127.0.0.1 --nproc_per_node=2 "
            f"'{copy}' --pre") in done.stdout
    trained, sample = done.stdout.split("run.sh: what the model writes after step 2 of 2:")
    assert len(losses(trained)) == 2 and "run.sh: another sample: ./run.sh sample " in sample
    assert f"./run.sh race '{copy}'" in sample.splitlines()[-1]
    assert "F.silu" in log.read_text() and "ranks: 2" in log.read_text()
    assert re.search(r"(?m)^all_gather: \d+\.\d\d ms for 67 MB$", log.read_text())

def test_repeats_with_fresh_seeds_and_ends_with_the_table(tmp_path, shards):
    flags = [flag for flag in TINY[1:] if not flag.startswith("--seed")]
    done = run_sh("--repeat=2", "demo", *flags, *shards, "--num_iterations=1",
                  "--micro_batches=1", f"--records={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [log.read_text() for log in tmp_path.glob("*.log")]
    seeds = {line for log in logs for line in log.splitlines() if line.startswith("seed = ")}
    assert len(logs) == 2 and len(seeds) == 2 and "over the runs  n" in done.stdout
    assert "sample.py" not in done.stdout

def test_what_the_check_finds_is_one_line_and_nothing_is_trained(tmp_path, shards):
    flags = ["speedrun", *TINY[1:], *shards, f"--records={tmp_path}"]
    done = run_sh(*flags, "--num_iterations=99999", NPROC="2")
    assert done.returncode == 2 and "not 99999: add shards, raise --epochs" in done.stderr
    assert done.stderr.count("\n") == 2 and "preset speedrun, 2 rank(s)" in done.stdout
    assert not list(tmp_path.iterdir())
