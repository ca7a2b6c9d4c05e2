"""The measure of the test suite: plants mistakes in train_gpt.py, one at a time, in a copy of the
repository, and shows for each that a test finds it.

    ./run.sh test mutants                  # all of them, in less than 30 minutes on one core
    ./run.sh test mutants --only=window    # those with this word in section, mistake or test

Prints a row of a Markdown table per mistake, with the first test that fails. Exit status 1 if a
mistake survives, or if a text that it replaces does not stand exactly once in the script. The suite
itself must pass before: a test that fails anyway finds nothing."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    section: int  # of the script
    mistake: str
    text: str  # stands once in the script, and is replaced by `wrong`
    wrong: str
    test: str  # the file, or the test in it, that finds the mistake


MUTANTS = [
    # Settings
    Mutant(1, "the rates fall over the last 60 %, not 40 %", 'flag(0.4, "last fraction',
           'flag(0.6, "last fraction', "test_schedules.py"),
    Mutant(1, "a sequence of 200 tokens is allowed", 'training sequence", min=1, unit=BLOCK',
           'training sequence", min=1', "test_settings.py"),
    Mutant(1, "a beta2 of 1 is allowed", 'mean square", max=1 - 1e-9', 'mean square", max=1',
           "test_settings.py"),
    # Schedules
    Mutant(2, "the window grows half a block too far", "hp.window_end - BLOCK / 2",
           "hp.window_end", "test_schedules.py"),
    Mutant(2, "the window is rounded down", "math.ceil(grown / BLOCK)",
           "math.floor(grown / BLOCK)", "test_schedules.py"),
    Mutant(2, "the learning rate is one step late", "left = max(0, 1 - step",
           "left = max(0, 1 - (step - 1)", "test_schedules.py"),
    Mutant(2, "the rates begin above their peak", "min(1, left / hp.cooldown_frac)",
           "left / hp.cooldown_frac", "test_schedules.py"),
    Mutant(2, "the momentum rises on", "min(1, step / hp.muon_momentum_steps)",
           "step / hp.muon_momentum_steps", "test_schedules.py"),
    # Block masks and attention
    Mutant(3, "a window one block too long", "(distance_NN < window_blocks)",
           "(distance_NN <= window_blocks)", "test_masks_attention.py"),
    Mutant(3, "a token does not see itself", "(key <= query)", "(key < query)",
           "test_masks_attention.py"),
    Mutant(3, "a block that a border crosses is called full",
           "(first_doc_N == last_doc_N[:, None])",
           "(first_doc_N == first_doc_N[:, None])", "test_masks_attention.py"),
    Mutant(3, "the diagonal is called full", "all_visible_NN = earlier_NN &",
           "all_visible_NN = (distance_NN >= 0) &", "test_masks_attention.py"),
    Mutant(3, "a short window of no block", ".clamp(min=1))]", ")]", "test_masks_attention.py"),
    Mutant(3, "a block's last key is left out", "int(query[-1]) + 1", "int(query[-1])",
           "test_masks_attention.py"),
    Mutant(3, "kv heads are shared in turn, not in groups",
           "repeat_interleave(q.size(1) // x.size(1), dim=1)",
           "repeat(1, q.size(1) // x.size(1), 1, 1)",
           "test_masks_attention.py"),
    # FP8 linear
    Mutant(4, "the product is not divided by the weight's factor", "scales[0] * scales[1]",
           "scales[0]", "test_fp8.py"),
    Mutant(4, "the input's gradient is divided by the input's factor", "grad_scale * w_scale",
           "grad_scale * x_scale", "test_fp8.py"),
    Mutant(4, "a cast that overflows", ".clamp(-limit, limit)", "", "test_fp8.py"),
    Mutant(4, "gradients in e4m3, whose range is small", "grad_scale, torch.float8_e5m2",
           "grad_scale, torch.float8_e4m3fn", "test_fp8.py"),
    Mutant(4, "validation in FP8", "self.fp8_scales and self.training", "self.fp8_scales",
           "test_fp8.py"),
    # Model
    Mutant(5, "the gradient's factor forgets the micro-batches", "FP8_SCALES[2] * hp.micro_batches",
           "FP8_SCALES[2]", "test_fp8.py"),
    Mutant(5, "the MLP's input is not normed", "self.mlp(norm(x_TD))", "self.mlp(x_TD)",
           "test_model.py"),
    Mutant(5, "skips from the first layer first", "skips.pop()", "skips.pop(0)", "test_model.py"),
    Mutant(5, "a rotation with a wrong sign", "b * cos - a * sin", "b * cos + a * sin",
           "test_model.py"),
    Mutant(5, "a softcap of twice the slope", "* (2 / c)", "* (4 / c)", "test_model.py"),
    Mutant(5, "the mean over the targets that count", "total / len(x_TD)",
           "total / (targets_T >= 0).sum()", "test_model.py"),
    Mutant(5, "all layers draw the same weights", 'f"{seed} {name}"', 'f"{seed}"',
           "test_model.py"),
    # Processes
    Mutant(6, "vectors are not summed over the processes", "return self.all_reduce(whole)",
           "return Exchange(whole)", "test_optimizers.py"),
    Mutant(6, "a process takes another's rows", "chunk(self.size)[self.rank]",
           "chunk(self.size)[self.rank - 1]", "test_optimizers.py"),
    Mutant(6, "rows that cannot be divided equally are divided", "len(whole) % self.size == 0",
           "len(whole) >= self.size", "test_optimizers.py"),
    Mutant(6, "nobody waits for a tensor on its way", "self.work.wait()", "pass",
           "test_optimizers.py"),
    Mutant(6, "a process of a second machine takes the GPU of its rank", "set_device(local_rank)",
           "set_device(rank)", "test_processes.py"),
    # Optimizers
    Mutant(7, "Adam's bias correction is one step late", "step + 1.0", "step + 2.0",
           "test_optimizers.py"),
    Mutant(7, "momentum without Nesterov's step", "gradients.lerp(momentum, beta)", "momentum",
           "test_optimizers.py"),
    Mutant(7, "momentum is a sum, not a mean", ".lerp_(gradients, 1 - beta)",
           ".mul_(beta).add_(gradients)", "test_optimizers.py"),
    Mutant(7, "wide matrices are scaled up, not tall ones", "ahead.size(-2) / ahead.size(-1)",
           "ahead.size(-1) / ahead.size(-2)", "test_optimizers.py"),
    Mutant(7, "rows are normed, not matrices", "x.norm(dim=(1, 2), keepdim",
           "x.norm(dim=2, keepdim", "test_optimizers.py"),
    Mutant(7, "Muon ignores the schedule of the rate", "alpha=-self.lr(step)",
           "alpha=-self.peak_lr", "test_optimizers.py"),
    # Data
    Mutant(8, "<= for <: a last target behind the shard's end", ") < shard.tokens:",
           ") <= shard.tokens:", "test_loader.py"),
    Mutant(8, "a process reads another's tokens", "world.rank * count * T", "world.rank * T",
           "test_loader.py"),
    Mutant(8, "tokens from 32768 on become negative", ".to(torch.int32) & 0xFFFF",
           ".to(torch.int32)", "test_loader.py"),
    Mutant(8, "every pass cuts the text at the same places", "(epoch * BLOCK) %", "0 %",
           "test_loader.py"),
    Mutant(8, "a token of vocab_size is taken", "largest < vocab_size", "largest <= vocab_size",
           "test_loader.py"),
    Mutant(8, "every process validates on the sequences of later ones",
           "sequences[world.rank::world.size]", "sequences[world.rank:]",
           "test_loader.py"),
    Mutant(8, "the padding of the validation counts", "(0, padding), value=-1)",
           "(0, padding), value=0)", "test_loader.py"),
    # Training steps
    Mutant(9, "the micro-batches' losses are summed, not averaged",
           "targets_T, window) / hp.micro_batches", "targets_T, window)", "test_optimizers.py"),
    Mutant(9, "a missing detach", "micro_loss.detach()", "micro_loss", "test_optimizers.py"),
    Mutant(9, "gradients are left to the next step", "model.zero_grad(set_to_none=True)", "pass",
           "test_optimizers.py"),
    Mutant(9, "the update takes the next step's rate", "optimizer.update(step)",
           "optimizer.update(step + 1)", "test_optimizers.py"),
    Mutant(9, "training goes on in evaluation's mode", "model.train()", "pass",
           "test_optimizers.py"),
    Mutant(9, "a validation target counts by its sequence's mean",
           "* len(inputs_T)", "* (targets_T >= 0).sum()", "test_optimizers.py"),
    Mutant(9, "the warmup keeps no copy to restore", 'x.to("cpu", copy=True)', 'x.to("cpu")',
           "test_training.py::test_the_warmup_leaves_no_trace"),
    # Checks, log, clock, checkpoints
    Mutant(10, "an exclusive limit", "low <= value <= high", "low < value <= high",
           "test_settings.py"),
    Mutant(10, "the first token of the validation is predicted", "for shard in val_shards) - 1",
           "for shard in val_shards)", "test_settings.py"),
    Mutant(10, "validation on training data", "by_fingerprint.setdefault(shard.fingerprint",
           "by_fingerprint.setdefault(shard.path", "test_settings.py"),
    Mutant(10, "a resumed run takes other data of the same name", "(shard.fingerprint, start)",
           "(shard.path, start)",
           "test_reliability.py::test_data_may_be_added_but_what_was_read_must_stay"),
    Mutant(10, "a log of the same second is overwritten", '"xb"', '"wb"',
           "test_reliability.py::test_logs_of_one_second_take_the_next_free_name"),
    Mutant(10, "a training loss with the next step's rate", 'step - 1 if kind',
           'step if kind',
           "test_training.py::test_step_lines_give_the_tokens_and_the_schedules"),
    Mutant(10, "the clock starts anew after each validation", "perf_counter() - self.seconds",
           "perf_counter()",
           "test_training.py::test_validating_and_saving_stop_the_clock"),
    Mutant(10, "a save that is not atomic", 'path.with_name("unfinished")', "path",
           "test_reliability.py::test_kills_at_every_place"),
    Mutant(10, "the one newest checkpoint is kept", '.pt"))[:-2]', '.pt"))[:-1]',
           "test_reliability.py::test_checkpoints_hold_all_that_decides_the_rest"),
    Mutant(10, "a damaged checkpoint is read", "zipfile.ZipFile(path).testzip() is None", "True",
           "test_reliability.py::test_no_damage_to_a_checkpoint_changes_what_is_read"),
    Mutant(10, "a checkpoint may run code", "weights_only=True, mmap", "weights_only=False, mmap",
           "test_reliability.py::test_what_is_no_whole_checkpoint_is_one_line"),
    Mutant(10, "what a failed save has written stays", "unfinished.unlink()", "pass",
           "test_reliability.py::test_a_full_disk_does_not_end_a_run"),
    # The run
    Mutant(11, "a resumed run reads the data from the start", "hp, world, plan.step)",
           "hp, world, 0)", "test_reliability.py::test_a_resumed_run_ends_in_the_same_bits"),
    Mutant(11, "a resumed run's time counts from zero", "StepClock(world.device, plan.seconds)",
           "StepClock(world.device, 0.0)",
           "test_reliability.py::test_a_resumed_run_ends_in_the_same_bits"),
    Mutant(11, "weights are saved without a validation", "if last or save_due or val_due:",
           "if last or val_due:",
           "test_reliability.py::test_weights_that_are_not_finite_are_never_saved"),
    Mutant(11, "a loss with the number of the step before", "clock.add_loss(step + 1,",
           "clock.add_loss(step,",
           "test_training.py::test_the_log_has_its_sections_and_its_last_lines"),
    Mutant(11, "validation does not stop the clock", "clock.stop()", "pass",
           "test_training.py::test_validating_and_saving_stop_the_clock"),
]


def run(mutant: Mutant, folder: Path) -> tuple[str, float]:
    """The first test that fails in the folder, a copy of the repository, when the mistake is
    planted, or "" if none does; and the seconds that this took."""
    script = folder / "train_gpt.py"
    right = script.read_text()
    script.write_text(right.replace(mutant.text, mutant.wrong))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", f"tests/{mutant.test}"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    script.write_text(right)
    failed = re.search(r"(?m)^FAILED tests/(.+?)(?: - .*)?$", done.stdout)
    if done.returncode not in (0, 1) or bool(failed) != (done.returncode == 1):
        sys.exit(f"{mutant.mistake}: the tests did not run\n{done.stdout}{done.stderr}")
    return failed[1] if failed else "", time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="mistakes with this word")
    only = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if only in " ".join(map(str, mutant))]
    script = (ROOT / "train_gpt.py").read_text()
    moved = [mutant.mistake for mutant in chosen if script.count(mutant.text) != 1]
    survivors = []
    print("| section | mistake | found by | seconds |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "repository"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "*.log", "*.pt", "*.bin", "race_*"))
        for mutant in chosen:
            if mutant.mistake in moved:
                continue
            failed, seconds = run(mutant, folder)
            if not failed:
                survivors.append(mutant.mistake)
            test = f"`{failed}`" if failed else "nothing"
            print(f"| {mutant.section} | {mutant.mistake} | {test} | {seconds:.0f} |", flush=True)
    for mistake in moved:
        print(f"error: the text of the mistake '{mistake}' does not stand once in train_gpt.py")
    for mistake in survivors:
        print(f"error: no test finds the mistake '{mistake}'")
    sys.exit(1 if moved or survivors else 0)


if __name__ == "__main__":
    main()
