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

# {(section, test): [(mistake, text of the script with «right→wrong» in it)]}
MISTAKES = {
    (1, "test_schedules.py"): [
        ("the rates fall over the last 60 %, not 40 %", 'flag(0.«4→6», "last fraction'),
        ("the window grows half a block too far", "hp.«window_end - BLOCK / 2→window_end»"),
        ("the window is rounded down", "math.«ceil→floor»(grown / BLOCK)"),
        ("the learning rate is one step late", "left = max(0, 1 - «step→(step - 1)»"),
        ("the rates begin above their peak",
         "«min(1, left / hp.cooldown_frac)→left / hp.cooldown_frac»"),
        ("the momentum rises on",
         "«min(1, step / hp.muon_momentum_steps)→step / hp.muon_momentum_steps»")],
    (1, "test_settings.py"): [
        ("a sequence of 200 tokens is allowed", 'training sequence", min=«1, unit=BLOCK→1»'),
        ("a beta2 of 1 is allowed", 'mean square", max=«1 - 1e-9→1»')],
    (2, "test_masks_attention.py"): [
        ("a window one block too long", "(distance_NN <«→=» window_blocks)"),
        ("a token does not see itself", "(key <«=→» query)"),
        ("a block that a border crosses is called full", "(first_N == «last_N→first_N»[:, None])"),
        ("the diagonal is called full", "all_NN = «earlier_NN→(distance_NN >= 0)» &"),
        ("a short window of no block", "«.clamp(min=1)→»)]"),
        ("a block's last key is left out", "int(query[-1])« + 1→»"),
        ("kv heads are shared in turn, not in groups",
         "«repeat_interleave(→repeat(1, »q.size(1) // x.size(1), «dim=1→1, 1»)")],
    (3, "test_fp8.py"): [
        ("the product is not divided by the weight's scale",
         "«INPUT_SCALE * WEIGHT_SCALE→INPUT_SCALE», x_"),
        ("the input's gradient is divided by the input's scale",
         "w8_DV, scale * «WEIGHT_SCALE→INPUT_SCALE»"),
        ("a cast that saturates too early", ".clamp(-«448, 448→240, 240»)"),
        ("gradients in e4m3, whose range is small", ".to(torch.«float8_e5m2→float8_e4m3fn»)"),
        ("validation in FP8", "self.«fp8_scale and self.training→fp8_scale»"),
        ("the loss's gradient of a target of -1 is not zero",
         "mul_(«torch.where(target_T < 0, 0.0, grad)[:, None]→grad»)"),
        ("a target of -1 is a loss",
         "«torch.where(target_T < 0, 0.0, →(»sum_T.log() - own_T)"),
        ("a loss's gradient ignores what it is multiplied by",
         "torch.where(target_T < 0, 0.0, «grad→1.0»)[:"),
        ("all tokens have the softmax of the first", "«(1 / sum_T)[:, None]→1 / sum_T[0]»")],
    (4, "test_fp8.py"): [
        ("the gradient's scale forgets the tokens of a step",
         "«GRADIENT_SCALE * hp.tokens_per_step→GRADIENT_SCALE»"),
        ("only the last part of a sequence is a loss", "loss «+→»= CrossEntropy"),
        ("every part has the targets of the first",
         "(self.logits(x), «target→targets_T[:len(x)]»)")],
    (4, "test_model.py"): [
        ("an embedding's gradient is summed in bfloat16", "self.«weight.float()→weight»)"),
        ("the MLP's input is not normed", "self.mlp(«norm(x_TD)→x_TD»)"),
        ("skips from the first layer first", "skips.pop(«→0»)"),
        ("a rotation with a wrong sign", "(s, «-s→s», 0 * still)"),
        ("a softcap of twice the slope", "* («2→4» / c)"),
        ("a mean, not a sum", "        return «loss→loss / len(x_TD)»\n\n    def features")],
    (5, "test_optimizers.py"): [
        ("vectors are not summed over the ranks", "return «self.all_reduce→Exchange»(whole)"),
        ("a rank takes another's rows", "chunk(self.size)[self.«rank→rank - 1»]"),
        ("rows that cannot be divided equally are divided",
         "len(whole) «% self.size == 0→>= self.size»"),
        ("nobody waits for a tensor on its way", "«self.work.wait()→pass»")],
    (5, "test_processes.py"): [
        ("a rank of a second machine takes the GPU of its rank", "set_device(«local_rank→rank»)")],
    (6, "test_optimizers.py"): [
        ("Adam's bias correction is one step late", "step + «1→2».0"),
        ("momentum without Nesterov's step", "«gradients.lerp(momentum, beta)→momentum»"),
        ("momentum is a sum, not a mean",
         ".«lerp_(gradients, 1 - beta)→mul_(beta).add_(gradients)»"),
        ("wide matrices are scaled up, not tall ones",
         "ahead.size(-«2→1») / ahead.size(-«1→2»)"),
        ("rows are normed, not matrices", "x.norm(dim=«(1, 2)→2», keepdim"),
        ("Muon ignores the schedule of the rate", "alpha=-self.«lr(step)→peak_lr»")],
    (6, "test_parameters.py"): [
        ("all parameters of a shape draw the same numbers", 'f"{seed}« {name}→»"'),
        ("the seed draws nothing", 'f"{«seed} {name→name»}"'),
        ("values that a constructor has set are replaced", "require(«p.isnan().all()→True», f"),
        ("a matrix without initial values passes",
         "require(«p.ndim < 2 and not p.isnan().any()→True», f"),
        ("a row without a parameter passes", "require(«i in rows.values()→True», f"),
        ("a pattern fits the beginning of a name", "re.«fullmatch→match»(row[0], name)"),
        ("the last row that fits, not the first", "rows[name] = fitting[«0→-1»]"),
        ("a row's options but the rate are dropped",
         'optimizer(params, hp, world, «**values→lr=values["lr"]»)'),
        ("frozen parameters are trained", "        if «p.requires_grad→True»:\n"),
        ("initial values of twice the size", "«0.5 * math→math».sqrt(3 / x.size(-1))")],
    (7, "test_loader.py"): [
        ("a last target behind the shard's end", "shard.tokens - «1 - hp→hp».tokens_per_step"),
        ("the overlapping last step is dropped", "            if last «>=→<» 0 and shard"),
        ("a last step overlaps wherever a token is left", "> «UNREAD * shard.tokens→0»:"),
        ("the validation's text is a token short", "hp.val_tokens «+ 1 →»- len(stream)"),
        ("a rank reads another's tokens", "world.rank * «count * T→T»"),
        ("tokens from 32768 on become negative", ".to(torch.int32)« & 0xFFFF→»"),
        ("every pass cuts the text at the same places", "«(epoch * BLOCK)→0» %"),
        ("a token of vocab_size is taken", "largest <«→=» vocab_size"),
        ("every rank validates on the sequences of later ones",
         "sequences[world.rank:«:world.size→»]"),
        ("the padding of the validation counts", "(0, padding), value=«-1→0»)")],
    (8, "test_optimizers.py"): [
        ("the loss is not divided", "targets_T, window)« / hp.tokens_per_step→»"),
        ("the loss is divided by the sequences too",
         "window) / hp.«tokens_per_step→tokens_per_step / hp.micro_batches»"),
        ("a missing detach", "«part.detach()→part»"),
        ("gradients are left to the next step", "«model.zero_grad(set_to_none=True)→pass»"),
        ("the update takes the next step's rate", "optimizer.update(«step→step + 1»)")],
    (8, "test_training.py::test_a_validation_is_the_mean_over_its_targets"): [
        ("training goes on in evaluation's mode", "«model.train()→pass»"),
        ("targets that do not count are counted", "«(targets_T >= 0).sum()→len(targets_T)»"),
        ("each rank has the loss of its own part", "«world.all_reduce(total).result()→total»")],
    (8, "test_training.py::test_the_warmup_leaves_no_trace"): [
        ("the warmup keeps no copy to restore", 'x.to("cpu"«, copy=True→»)')],
    (9, "test_settings.py::test_training_shards_without_a_step_are_refused"): [
        ("training shards without a step pass", "require(«sum(short) <= UNREAD *→True or» sum")],
    (9, "test_training.py::test_a_pass_leaves_out_at_most_a_fiftieth"): [
        ("the log calls read what no step reads",
         "start + «plan.hp.tokens_per_step + 1→2 * plan.hp.tokens_per_step» for")],
    (9, "test_reliability.py::test_settings_stay_but_those_that_are_named"): [
        ("a changed setting is not said", "if «value→None» != (old := ")],
    (9, "test_training.py::test_the_clock_on_cuda_has_the_devices_time_of_each_step"): [
        ("a loss has the time at which the host reads it",
         "self.seconds_at(«mark→self.mark()»)\n            y")],
    (9, "test_settings.py"): [
        ("an exclusive limit", "low <«=→» value <= high"),
        ("the first token of the validation is predicted", "for shard in val_shards)« - 1→»"),
        ("validation on training data", "by_fingerprint.setdefault(shard.«fingerprint→path»")],
    (9, "test_reliability.py::test_data_may_be_added_but_what_was_read_must_stay"): [
        ("a resumed run takes other data of the same name", "(shard.«fingerprint→path», start)")],
    (9, "test_reliability.py::test_logs_of_one_second_take_the_next_free_name"): [
        ("a log of the same second is overwritten", '"«x→w»b"')],
    (9, "test_training.py::test_step_lines_give_the_tokens_and_the_schedules"): [
        ("a training loss with the next step's rate", "step «- 1 if→if» kind")],
    (9, "test_training.py::test_validating_and_saving_stop_the_clock"): [
        ("the clock starts anew after each validation", "self.before = «self.seconds→0.0»")],
    (9, "test_reliability.py::test_kills_at_every_place"): [
        ("a save that is not atomic", '«path.with_name("unfinished")→path»')],
    (9, "test_reliability.py::test_checkpoints_hold_all_that_decides_the_rest"): [
        ("the one newest checkpoint is kept", '.pt"))[:-«2→1»]')],
    (9, "test_reliability.py::test_no_damage_to_a_checkpoint_changes_what_is_read"): [
        ("a damaged checkpoint is read", "«zipfile.ZipFile(path).testzip() is None→True»")],
    (9, "test_reliability.py::test_what_is_no_whole_checkpoint_is_one_line"): [
        ("a checkpoint may run code", "weights_only=«True→False», mmap")],
    (9, "test_reliability.py::test_a_full_disk_does_not_end_a_run"): [
        ("what a failed save has written stays", "«unfinished.unlink()→pass»")],
    (10, "test_reliability.py::test_a_resumed_run_ends_in_the_same_bits"): [
        ("a resumed run reads the data from the start", "hp, world, «plan.step→0»)"),
        ("a resumed run's time counts from zero", "StepClock(world.device, «plan.seconds→0.0»)")],
    (10, "test_reliability.py::test_weights_that_are_not_finite_are_never_saved"): [
        ("weights are saved without a validation", "if last or «save_due or val_due→val_due»:")],
    (10, "test_training.py::test_the_log_has_its_sections_and_its_last_lines"): [
        ("a loss with the number of the step before", "clock.add_loss(«step + 1→step»,")],
    (10, "test_training.py::test_validating_and_saving_stop_the_clock"): [
        ("validation does not stop the clock", "«                clock.stop()\n→»")]}
MUTANTS = [
    Mutant(section, mistake, *(re.sub("(?s)«(.*?)→(.*?)»", side, marked) for side in (r"\1", r"\2")),
           test)
    for (section, test), mistakes in MISTAKES.items() for mistake, marked in mistakes]

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
    errors = []
    print("| section | mistake | found by | seconds |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "repository"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "*.log", "*.pt", "*.bin", "race_*"))
        for mutant in chosen:
            if script.count(mutant.text) != 1:
                errors.append(f"the text of '{mutant.mistake}' does not stand once in the script")
                continue
            failed, seconds = run(mutant, folder)
            if not failed:
                errors.append(f"no test finds the mistake '{mutant.mistake}'")
            test = f"`{failed}`" if failed else "nothing"
            print(f"| {mutant.section} | {mutant.mistake} | {test} | {seconds:.0f} |", flush=True)
    for error in errors:
        print(f"error: {error}")
    sys.exit(bool(errors))

if __name__ == "__main__":
    main()
