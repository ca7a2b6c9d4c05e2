"""The measure of the test suite: plants mistakes in train_gpt.py, one at a time, in a copy of the
repository, and shows for each that a test finds it.

    ./run.sh test mutants                  # all of them, in less than an hour on one core
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
    Mutant(1, "the window grows half a block too far", "hp.window_end - BLOCK / 2",
           "hp.window_end", "test_schedules.py"),
    Mutant(1, "the window is rounded down", "math.ceil(grown / BLOCK)",
           "math.floor(grown / BLOCK)", "test_schedules.py"),
    Mutant(1, "the learning rate is one step late", "left = max(0, 1 - step",
           "left = max(0, 1 - (step - 1)", "test_schedules.py"),
    Mutant(1, "the rates begin above their peak", "min(1, left / hp.cooldown_frac)",
           "left / hp.cooldown_frac", "test_schedules.py"),
    Mutant(1, "the momentum rises on", "min(1, step / hp.muon_momentum_steps)",
           "step / hp.muon_momentum_steps", "test_schedules.py"),
    # Block masks and attention
    Mutant(2, "a window one block too long", "(distance_NN < window_blocks)",
           "(distance_NN <= window_blocks)", "test_masks_attention.py"),
    Mutant(2, "a token does not see itself", "(key <= query)", "(key < query)",
           "test_masks_attention.py"),
    Mutant(2, "a block that a border crosses is called full",
           "(first_N == last_N[:, None])", "(first_N == first_N[:, None])",
           "test_masks_attention.py"),
    Mutant(2, "the diagonal is called full", "all_NN = earlier_NN &",
           "all_NN = (distance_NN >= 0) &", "test_masks_attention.py"),
    Mutant(2, "a short window of no block", ".clamp(min=1))]", ")]", "test_masks_attention.py"),
    Mutant(2, "a block's last key is left out", "int(query[-1]) + 1", "int(query[-1])",
           "test_masks_attention.py"),
    Mutant(2, "kv heads are shared in turn, not in groups",
           "repeat_interleave(q.size(1) // x.size(1), dim=1)",
           "repeat(1, q.size(1) // x.size(1), 1, 1)",
           "test_masks_attention.py"),
    # The head: FP8 and the loss
    Mutant(3, "the product is not divided by the weight's scale", "INPUT_SCALE * WEIGHT_SCALE, x_",
           "INPUT_SCALE, x_", "test_fp8.py"),
    Mutant(3, "the input's gradient is divided by the input's scale", "w8_DV, scale * WEIGHT_SCALE",
           "w8_DV, scale * INPUT_SCALE", "test_fp8.py"),
    Mutant(3, "a cast that saturates too early", ".clamp(-448, 448)",
           ".clamp(-240, 240)", "test_fp8.py"),
    Mutant(3, "gradients in e4m3, whose range is small", ".to(torch.float8_e5m2)",
           ".to(torch.float8_e4m3fn)", "test_fp8.py"),
    Mutant(3, "validation in FP8", "self.fp8_scale and self.training", "self.fp8_scale",
           "test_fp8.py"),
    Mutant(3, "the loss's gradient of a target of -1 is not zero",
           "mul_(torch.where(target_T < 0, 0.0, grad)[:, None])", "mul_(grad)", "test_fp8.py"),
    Mutant(3, "a target of -1 is a loss", "torch.where(target_T < 0, 0.0, sum_T.log() - own_T)",
           "(sum_T.log() - own_T)", "test_fp8.py"),
    Mutant(3, "a loss's gradient ignores what it is multiplied by",
           "torch.where(target_T < 0, 0.0, grad)[:", "torch.where(target_T < 0, 0.0, 1.0)[:",
           "test_fp8.py"),
    Mutant(3, "all tokens have the softmax of the first", "(1 / sum_T)[:, None]", "1 / sum_T[0]",
           "test_fp8.py"),
    # Model
    Mutant(4, "the gradient's scale forgets the tokens of a step",
           "GRADIENT_SCALE * hp.tokens_per_step", "GRADIENT_SCALE", "test_fp8.py"),
    Mutant(4, "only the last part of a sequence is a loss", "loss += CrossEntropy",
           "loss = CrossEntropy", "test_fp8.py"),
    Mutant(4, "every part has the targets of the first", "(self.logits(x), target)",
           "(self.logits(x), targets_T[:len(x)])", "test_fp8.py"),
    Mutant(4, "an embedding's gradient is summed in bfloat16", "self.weight.float())",
           "self.weight)", "test_model.py"),
    Mutant(4, "the MLP's input is not normed", "self.mlp(norm(x_TD))", "self.mlp(x_TD)",
           "test_model.py"),
    Mutant(4, "skips from the first layer first", "skips.pop()", "skips.pop(0)", "test_model.py"),
    Mutant(4, "a rotation with a wrong sign", "(s, -s, 0 * still)", "(s, s, 0 * still)",
           "test_model.py"),
    Mutant(4, "a softcap of twice the slope", "* (2 / c)", "* (4 / c)", "test_model.py"),
    Mutant(4, "a mean, not a sum", "        return loss\n\n    def features",
           "        return loss / len(x_TD)\n\n    def features", "test_model.py"),
    # Ranks
    Mutant(5, "vectors are not summed over the ranks", "return self.all_reduce(whole)",
           "return Exchange(whole)", "test_optimizers.py"),
    Mutant(5, "a rank takes another's rows", "chunk(self.size)[self.rank]",
           "chunk(self.size)[self.rank - 1]", "test_optimizers.py"),
    Mutant(5, "rows that cannot be divided equally are divided", "len(whole) % self.size == 0",
           "len(whole) >= self.size", "test_optimizers.py"),
    Mutant(5, "nobody waits for a tensor on its way", "self.work.wait()", "pass",
           "test_optimizers.py"),
    Mutant(5, "a rank of a second machine takes the GPU of its rank", "set_device(local_rank)",
           "set_device(rank)", "test_processes.py"),
    # Optimizers
    Mutant(6, "Adam's bias correction is one step late", "step + 1.0", "step + 2.0",
           "test_optimizers.py"),
    Mutant(6, "momentum without Nesterov's step", "gradients.lerp(momentum, beta)", "momentum",
           "test_optimizers.py"),
    Mutant(6, "momentum is a sum, not a mean", ".lerp_(gradients, 1 - beta)",
           ".mul_(beta).add_(gradients)", "test_optimizers.py"),
    Mutant(6, "wide matrices are scaled up, not tall ones", "ahead.size(-2) / ahead.size(-1)",
           "ahead.size(-1) / ahead.size(-2)", "test_optimizers.py"),
    Mutant(6, "rows are normed, not matrices", "x.norm(dim=(1, 2), keepdim",
           "x.norm(dim=2, keepdim", "test_optimizers.py"),
    Mutant(6, "Muon ignores the schedule of the rate", "alpha=-self.lr(step)",
           "alpha=-self.peak_lr", "test_optimizers.py"),
    # Parameters
    Mutant(6, "all parameters of a shape draw the same numbers", 'f"{seed} {name}"', 'f"{seed}"',
           "test_parameters.py"),
    Mutant(6, "the seed draws nothing", 'f"{seed} {name}"', 'f"{name}"', "test_parameters.py"),
    Mutant(6, "values that a constructor has set are replaced", "require(p.isnan().all(), f",
           "require(True, f", "test_parameters.py"),
    Mutant(6, "a matrix without initial values passes",
           "require(p.ndim < 2 and not p.isnan().any(), f", "require(True, f",
           "test_parameters.py"),
    Mutant(6, "a row without a parameter passes", "require(i in rows.values(), f",
           "require(True, f", "test_parameters.py"),
    Mutant(6, "a pattern fits the beginning of a name", "re.fullmatch(row[0], name)",
           "re.match(row[0], name)", "test_parameters.py"),
    Mutant(6, "the last row that fits, not the first", "rows[name] = fitting[0]",
           "rows[name] = fitting[-1]", "test_parameters.py"),
    Mutant(6, "a row's options but the rate are dropped", "optimizer(params, hp, world, **values)",
           'optimizer(params, hp, world, lr=values["lr"])', "test_parameters.py"),
    Mutant(6, "frozen parameters are trained", "        if p.requires_grad:\n",
           "        if True:\n", "test_parameters.py"),
    Mutant(6, "initial values of twice the size", "0.5 * math.sqrt(3 / x.size(-1))",
           "math.sqrt(3 / x.size(-1))", "test_parameters.py"),
    # Data
    Mutant(7, "a last target behind the shard's end", "shard.tokens - 1 - hp.tokens_per_step",
           "shard.tokens - hp.tokens_per_step", "test_loader.py"),
    Mutant(7, "the overlapping last step is dropped", "            if last >= 0 and shard",
           "            if last < 0 and shard", "test_loader.py"),
    Mutant(7, "a last step overlaps wherever a token is left", "> UNREAD * shard.tokens:", "> 0:",
           "test_loader.py"),
    Mutant(7, "the validation's text is a token short", "hp.val_tokens + 1 - len(stream)",
           "hp.val_tokens - len(stream)", "test_loader.py"),
    Mutant(7, "a rank reads another's tokens", "world.rank * count * T", "world.rank * T",
           "test_loader.py"),
    Mutant(7, "tokens from 32768 on become negative", ".to(torch.int32) & 0xFFFF",
           ".to(torch.int32)", "test_loader.py"),
    Mutant(7, "every pass cuts the text at the same places", "(epoch * BLOCK) %", "0 %",
           "test_loader.py"),
    Mutant(7, "a token of vocab_size is taken", "largest < vocab_size", "largest <= vocab_size",
           "test_loader.py"),
    Mutant(7, "every rank validates on the sequences of later ones",
           "sequences[world.rank::world.size]", "sequences[world.rank:]",
           "test_loader.py"),
    Mutant(7, "the padding of the validation counts", "(0, padding), value=-1)",
           "(0, padding), value=0)", "test_loader.py"),
    # Steps
    Mutant(8, "the loss is not divided", "targets_T, window) / hp.tokens_per_step",
           "targets_T, window)", "test_optimizers.py"),
    Mutant(8, "the loss is divided by the sequences too", "window) / hp.tokens_per_step",
           "window) / hp.tokens_per_step / hp.micro_batches", "test_optimizers.py"),
    Mutant(8, "a missing detach", "part.detach()", "part", "test_optimizers.py"),
    Mutant(8, "gradients are left to the next step", "model.zero_grad(set_to_none=True)", "pass",
           "test_optimizers.py"),
    Mutant(8, "the update takes the next step's rate", "optimizer.update(step)",
           "optimizer.update(step + 1)", "test_optimizers.py"),
    Mutant(8, "training goes on in evaluation's mode", "model.train()", "pass",
           "test_optimizers.py"),
    Mutant(8, "targets that do not count are counted", "(targets_T >= 0).sum()",
           "len(targets_T)", "test_training.py::test_a_validation_is_the_mean_over_its_targets"),
    Mutant(8, "each rank has the loss of its own part", "world.all_reduce(total).result()",
           "total", "test_training.py::test_a_validation_is_the_mean_over_its_targets"),
    Mutant(8, "the warmup keeps no copy to restore", 'x.to("cpu", copy=True)', 'x.to("cpu")',
           "test_training.py::test_the_warmup_leaves_no_trace"),
    # Checks, log, clock, checkpoints
    Mutant(9, "training shards without a step pass", "require(sum(short) <= UNREAD * sum",
           "require(True or sum",
           "test_settings.py::test_training_shards_without_a_step_are_refused"),
    Mutant(9, "the log calls read what no step reads", "start + plan.hp.tokens_per_step + 1 for",
           "start + 2 * plan.hp.tokens_per_step for",
           "test_training.py::test_a_pass_leaves_out_at_most_a_fiftieth"),
    Mutant(9, "a changed setting is not said", "if value != (old := ", "if None != (old := ",
           "test_reliability.py::test_settings_stay_but_those_that_are_named"),
    Mutant(9, "a loss has the time at which the host reads it",
           "self.seconds_at(mark)\n            y", "self.seconds_at(self.mark())\n            y",
           "test_training.py::test_the_clock_on_cuda_has_the_devices_time_of_each_step"),
    Mutant(9, "an exclusive limit", "low <= value <= high", "low < value <= high",
           "test_settings.py"),
    Mutant(9, "the first token of the validation is predicted", "for shard in val_shards) - 1",
           "for shard in val_shards)", "test_settings.py"),
    Mutant(9, "validation on training data", "by_fingerprint.setdefault(shard.fingerprint",
           "by_fingerprint.setdefault(shard.path", "test_settings.py"),
    Mutant(9, "a resumed run takes other data of the same name", "(shard.fingerprint, start)",
           "(shard.path, start)",
           "test_reliability.py::test_data_may_be_added_but_what_was_read_must_stay"),
    Mutant(9, "a log of the same second is overwritten", '"xb"', '"wb"',
           "test_reliability.py::test_logs_of_one_second_take_the_next_free_name"),
    Mutant(9, "a training loss with the next step's rate", 'step - 1 if kind',
           'step if kind',
           "test_training.py::test_step_lines_give_the_tokens_and_the_schedules"),
    Mutant(9, "the clock starts anew after each validation", "self.before = self.seconds",
           "self.before = 0.0",
           "test_training.py::test_validating_and_saving_stop_the_clock"),
    Mutant(9, "a save that is not atomic", 'path.with_name("unfinished")', "path",
           "test_reliability.py::test_kills_at_every_place"),
    Mutant(9, "the one newest checkpoint is kept", '.pt"))[:-2]', '.pt"))[:-1]',
           "test_reliability.py::test_checkpoints_hold_all_that_decides_the_rest"),
    Mutant(9, "a damaged checkpoint is read", "zipfile.ZipFile(path).testzip() is None", "True",
           "test_reliability.py::test_no_damage_to_a_checkpoint_changes_what_is_read"),
    Mutant(9, "a checkpoint may run code", "weights_only=True, mmap", "weights_only=False, mmap",
           "test_reliability.py::test_what_is_no_whole_checkpoint_is_one_line"),
    Mutant(9, "what a failed save has written stays", "unfinished.unlink()", "pass",
           "test_reliability.py::test_a_full_disk_does_not_end_a_run"),
    # The run
    Mutant(10, "a resumed run reads the data from the start", "hp, world, plan.step)",
           "hp, world, 0)", "test_reliability.py::test_a_resumed_run_ends_in_the_same_bits"),
    Mutant(10, "a resumed run's time counts from zero", "StepClock(world.device, plan.seconds)",
           "StepClock(world.device, 0.0)",
           "test_reliability.py::test_a_resumed_run_ends_in_the_same_bits"),
    Mutant(10, "weights are saved without a validation", "if last or save_due or val_due:",
           "if last or val_due:",
           "test_reliability.py::test_weights_that_are_not_finite_are_never_saved"),
    Mutant(10, "a loss with the number of the step before", "clock.add_loss(step + 1,",
           "clock.add_loss(step,",
           "test_training.py::test_the_log_has_its_sections_and_its_last_lines"),
    Mutant(10, "validation does not stop the clock", "                clock.stop()\n", "",
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
