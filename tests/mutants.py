"""The measure of the test suite: plants mistakes in train_gpt.py and in the programs, one at a
time, in a copy of the repository, and shows for each that a test finds it.

    ./run.sh test mutants                       # all of them, in twenty minutes on one core
    ./run.sh test mutants --only=train_gpt.py   # those in the script
    ./run.sh test mutants --quick               # which of them does ./run.sh test quick find?
    ./run.sh test mutants --only=window         # those with this word in mistake, text or test

Prints a row of a Markdown table per mistake, with the first test that fails. Exit status 1 if a
mistake survives, or if a text that it replaces does not stand exactly once in its program. The
suite itself must pass before: a test that fails anyway finds nothing."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

class Mutant(NamedTuple):
    program: str  # that is changed
    section: int  # of the script; 0 in another program
    file: str  # of the tests that find the mistake
    test: str  # a word in the name of the one that does, where the others take long
    mistake: str
    text: str  # stands once in the program, and is replaced by `wrong`
    wrong: str

# {(section, file): [(mistake, text of the script with «right→wrong» in it, test)]}
IN_THE_SCRIPT = {
    (1, "test_schedules.py"): [
        ("the rates fall over the last 60 %, not 40 %", 'flag(0.«4→6», "final fraction'),
        ("the window grows half a block too far", "hp.«window_end - BLOCK / 2→window_end»"),
        ("the window is rounded down", "math.«ceil→floor»(grown / BLOCK)"),
        ("the learning rate is one step late", "left = max(0, 1 - «step→(step - 1)»"),
        ("the rates begin above their peak", "«min(1, left→(left» / hp.cooldown_frac)"),
        ("the momentum rises on", "«min(1, step→(step» / hp.muon_momentum_steps)")],
    (1, "test_settings.py"): [
        ("a sequence of 200 tokens", 'training sequence", low=«1, unit=BLOCK→1»', "no_sense"),
        ("a beta2 of 1 is allowed", 'mean square", high=«1 - 1e-9→1»', "no_sense")],
    (2, "test_fp8.py"): [
        ("validation in FP8", "self.«gradient_scale and self.training→gradient_scale»"),
        ("too small a scale of gradients", "TOKEN_GRADIENT_SCALE« * hp.tokens_per_step→» if hp")],
    (2, "test_model.py"): [
        ("only the last part of a sequence is a loss", "loss «+→»= CrossEntropy"),
        ("all parts have one's targets", "(self.logits(x), «target→targets_T[:len(x)]»)"),
        ("an embedding's gradient is summed in bfloat16", "self.«weight.float()→weight»)"),
        ("the MLP's input is not normed", "self.mlp(«norm(x_TD)→x_TD»)"),
        ("skips from the first layer first", "skips.pop(«→0»)"),
        ("a rotation with a wrong sign", "(s, «-s→s», 0 * ones)"),
        ("a softcap of twice the slope", "* («2→4» / c)"),
        ("a mean, not a sum", "        return «loss→loss / len(x_TD)»\n\n    def features")],
    (3, "test_masks_attention.py"): [
        ("a window one block too long", "(distance_NN <«→=» window_blocks)"),
        ("a token does not see itself", "(key <«=→» query)"),
        ("a block that a border crosses is called full", "(first_N == «last_N→first_N»[:, None])"),
        ("the diagonal is called full", "all_visible_NN = (distance_NN «>→>=» 0) &"),
        ("a short window of no block", "«.clamp(min=1)→»)]"),
        ("a block's last key is left out", "int(query[-1])« + 1→»")],
    (3, "test_model.py"): [
        ("kv heads in turn",
         "«repeat_interleave(→repeat(1, »q.size(1) // x.size(1), «dim=1→1, 1»)")],
    (4, "test_fp8.py"): [
        ("the product keeps the weight's scale", "«INPUT_SCALE * WEIGHT_SCALE→INPUT_SCALE», x_"),
        ("the input's gradient by its own scale", "w8_DV, ctx.scale * «WEIGHT_SCALE→INPUT_SCALE»"),
        ("a cast that saturates too early", ".clamp(-«448, 448→240, 240»)"),
        ("gradients in e4m3, whose range is small", ".to(torch.«float8_e5m2→float8_e4m3fn»)"),
        ("a gradient where the target is -1",
         "mul_(«torch.where(target_T < 0, 0.0, grad)[:, None]→grad»)"),
        ("a target of -1 is a loss", "«torch.where(target_T < 0, 0.0, →(»sum_T.log() -"),
        ("the gradient of the loss times 1", "torch.where(target_T < 0, 0.0, «grad→1.0»)[:"),
        ("all tokens have the softmax of the first", "«(1 / sum_T)[:, None]→1 / sum_T[0]»")],
    (5, "test_parameters.py"): [
        ("all parameters of a shape draw the same numbers", 'f"{seed}« {name}→»"'),
        ("the seed draws nothing", 'f"{«seed} {name→name»}"'),
        ("values of a constructor are replaced", "require(«p.isnan().all()→True», f"),
        ("undrawn matrices pass", "require(«p.ndim < 2 and not p.isnan().any()→True», f"),
        ("a rule without a parameter passes", "require(«i in rules.values()→True», f"),
        ("a pattern fits the beginning of a name", "re.«fullmatch→match»(pattern, name)"),
        ("the last rule that fits, not the first", "rules[name] = fitting[«0→-1»]"),
        ("initial values of twice the size", "«0.5 * math→math».sqrt(3 / x.size(-1))")],
    (6, "test_optimizers.py"): [
        ("vectors are not summed over the ranks", "return «self.all_reduce→Pending»(whole)"),
        ("a rank takes another's rows", "chunk(self.size)[self.«rank→rank - 1»]"),
        ("rows are divided unequally", "len(whole) «% self.size == 0→>= self.size»"),
        ("nobody waits for a tensor on its way", "«self.work.wait()→pass»"),
        ("Adam's bias correction is one step late", "step + «1→2».0"),
        ("momentum without Nesterov's step", "«gradients.lerp(momentum, beta)→momentum»"),
        ("a sum of gradients", ".«lerp_(gradients, 1 - beta)→mul_(beta).add_(gradients)»"),
        ("wide matrices are scaled up, not tall ones", "ahead.size(-«2→1») / ahead.size(-«1→2»)"),
        ("rows are normed, not matrices", "x.norm(dim=«(1, 2)→2», keepdim"),
        ("Muon ignores the schedule of the rate", "alpha=-self.«lr(step)→peak_lr»")],
    (6, "test_parameters.py"): [
        ("a rule's betas are dropped", 'world, «**values→lr=values["lr"]»)')],
    (6, "test_edits.py"): [
        ("frozen parameters are trained", "        if «p.requires_grad→True»:\n", "frozen")],
    (7, "test_loader.py"): [
        ("a last target behind the shard's end", "shard.tokens - «1 - hp→hp».tokens_per_step"),
        ("the overlapping last step is dropped", "            if last «>=→<» 0 and shard"),
        ("a last step overlaps wherever a token is left", "> «UNREAD * shard.tokens→0»:"),
        ("the validation's text is a token short", "hp.val_tokens «+ 1 →»- len(stream)"),
        ("a rank reads another's tokens", "world.rank * «count * T→T»"),
        ("tokens from 32768 on become negative", ".to(torch.int32)« & 0xFFFF→»"),
        ("every pass cuts the text at the same places", "«(epoch * BLOCK)→0» %"),
        ("a token of vocab_size is taken", "largest <«→=» vocab_size"),
        ("ranks validate on others' sequences", "sequences[world.rank:«:world.size→»]"),
        ("the padding of the validation counts", "(0, padding), value=«-1→0»)")],
    (8, "test_optimizers.py"): [
        ("the loss is not divided", "targets_T, window)« / hp.tokens_per_step→»"),
        ("the loss divided twice", ") / hp.«tokens_per_step→tokens_per_step / hp.micro_batches»"),
        ("a missing detach", "+= «loss.detach()→loss»"),
        ("gradients are left to the next step", "«model.zero_grad(set_to_none=True)→pass»"),
        ("the update takes the next step's rate", "optimizer.update(«step→step + 1»)")],
    (8, "test_training.py"): [
        ("training goes on in evaluation's mode", "«model.train()→pass»", "mean_over"),
        ("targets of -1 are counted", "«(targets_T >= 0).sum()→len(targets_T)»", "mean_over"),
        ("each rank has a loss of its own", "«world.all_reduce(total).wait()→total»", "mean_over"),
        ("the warmup keeps no copy to restore", 'x.to("cpu"«, copy=True→»)', "no_trace")],
    (9, "test_reliability.py"): [
        ("a resumed run reads the data from the start", "world, «plan.first_step→0»)", "same_bits"),
        ("a resumed run's time is from 0", "(world.device, «plan.seconds→0.0»)", "same_bits"),
        ("saves without a validation", "if last or «save_due or val_due→val_due»:", "not_finite")],
    (9, "test_training.py"): [
        ("a loss one step too early", "clock.add_loss(«step + 1→step»,", "sections"),
        ("validating is timed", "«                clock.stop()\n→»", "stop_the_clock")],
    (10, "test_loader.py"): [
        ("too little is unread",
         "start + «plan.hp.tokens_per_step + 1→2 * plan.hp.tokens_per_step» for", "two_percent")],
    (10, "test_processes.py"): [
        ("the GPU is chosen by rank", "set_device(«local_rank→rank»)")],
    (10, "test_settings.py"): [
        ("shards without a step pass", "(«sum(small) <= UNREAD *→True or»", "without_a_step"),
        ("an exclusive limit", "low <«=→» value <= high"),
        ("the first token of the validation is predicted", "for shard in val_shards)« - 1→»"),
        ("validation on training data", "by_fingerprint.setdefault(shard.«fingerprint→path»")],
    (10, "test_training.py"): [
        ("a loss's time is its reading's", "seconds_at(«mark→self.mark()»)\n  ", "devices_time"),
        ("a training loss with the next step's rate", "done «- 1 if→if» kind", "step_lines"),
        ("the clock starts anew at each start", "before = «self.seconds→0.0»", "stop_the_clock")],
    (10, "test_reliability.py"): [
        ("a changed setting is not said", "if «value→None» != (old := ", "settings_stay"),
        ("a resumed run takes other data", "(shard.«fingerprint→path», start)", "data_may"),
        ("a log of the same second is overwritten", '"«x→w»b"', "one_second"),
        ("a save that is not atomic", '«path.with_name("unfinished")→path»', "every_place"),
        ("the one newest checkpoint is kept", '.pt"))[:-«2→1»]', "all_that_decides"),
        ("a damaged file is read", "«zipfile.ZipFile(path).testzip() is None→True»", "no_damage"),
        ("a checkpoint may run code", "weights_only=«True→False», mmap", "no_whole"),
        ("what a failed save has written stays", "«unfinished.unlink()→pass»", "full_disk")]}

# {(program, file): [(mistake, text of the program with «right→wrong» in it, test)]}
IN_PROGRAMS = {
    ("run.sh", "test_run.py"): [
        ("an error is status 1", '"error: $*" >&2; exit «2→1»', "asked_for")],
    ("run.sh", "test_launch.py"): [
        ("a program's failure is lost", '*) «exec →»"$python" -W ignore "records/tools/$program.py"'
         ' "${@:2}"« ;;→ || true ;;»', "check_finds"),
        ("a link finds no programs", '"$(«readlink -f →echo »"${BASH', "two_processes"),
        ("a word with a space becomes two", '"${@:2}" «"$word"→$word»', "two_processes")],
    ("records/tools/fits.py", "test_run.py"): [
        ("the oldest torch that will do is refused", "[:3]] «<→<=» [2, 9, 1]", "oldest_torch")],
    ("data/common.py", "test_data_common.py"): [
        ("a token of vocab_size is sound", "tokens.max() «>=→>» vocab_size", "first_bad"),
        ("two programs hold one lock", "fcntl.«LOCK_EX→LOCK_SH» | fcntl", "one_run_at")],
    ("data/common.py", "test_race.py"): [
        ("a program's own status is lost", "return main() «or→and» 0", "status_and")],
    ("data/fineweb.py", "test_data_fineweb.py"): [
        ("a chunk too few is fetched", "range(1, args.num_chunks« + 1→»)"),
        ("the hub's checksum is not compared", "check(path, «etag→None» if"),
        ("a damaged download stays", "        «path.unlink()→pass»\n        raise"),
        ("damaged files are not fetched again", "«wanted.append(name)→pass»\n            tqdm")],
    ("data/inspect_shards.py", "test_data_inspect.py"): [
        ("a bad shard is status 0", "            status = «2→0»")],
    ("data/tokenize_text.py", "test_data_tokenize.py"): [
        ("the rest behind the last whole piece is lost", "range(0, len(text)«→ - length + 1», len"),
        ("copies of a document go to both sides", "blake2b(«data→place.encode()», digest")],
    ("data/tokenize_text.py", "test_launch.py"): [
        ("each shuffle is another one", "RandomState(«0→»)", "made_again")],
    ("data/vocab.py", "test_data_vocab.py"): [
        ("text can spell the end of a document", '«disallowed_special=()→allowed_special="all"»')],
    ("records/tools/launch.py", "test_launch.py"): [
        ("a chunk of FineWeb too few", "math.«ceil→floor»(tokens /", "presets_get"),
        ("training starts though the check fails", "if «program.returncode→False»:", "check_finds"),
        ("damaged shards stay", "«found == sums→found.keys() == sums.keys()»", "damaged"),
        ("a copy's run is resumed by the script", "(«same or scripts→scripts»)[0]", "is_resumed"),
        ("repeats have one seed", "and «hp.seed < 0 and →»not", "can_fix")],
    ("records/tools/launch.py", "test_watch.py"): [
        ("a signal's status is another one", "else 128 «-→+» status)", "breaks_is_said"),
        ("the wrong rank is blamed", " < 0« and code != -signal.SIGTERM→»]", "is_blamed")],
    ("records/tools/race.py", "test_race.py"): [
        ("the first seed is not the one asked for", "first = «self.options.seed→1»\n",
         "two_settings"),
        ("the copy always begins", "missing if «pair % 2→True» else", "in_turn"),
        ("a race that is lost is status 0", '["decision"], «3→0»)', "status_and"),
        ("a second copy is taken for a flag", "require(«len(scripts) == 1→True»", "wrong_usage"),
        ("a race goes on with other flags", '"sha256", «"flags", →»"dis', "refuses_what"),
        ("losses on other texts are raced", "any(«ours.validated_on != theirs→ours.validated_on "
         "!= ours».validated_on", "status_and")],
    ("records/tools/trial.py", "test_race.py"): [
        ("runs of another script count", "if «same and →»whole", "which_runs"),
        ("an exam that failed is passed", "if «status or not rows→False»:", "a_mistake_shows")],
    ("records/tools/verdict.py", "test_race.py"): [
        ("a copy that trains on more is kept", "not one.dishonest« and equal→» and", "status_and")],
    ("records/tools/verify.py", "test_verify.py"): [
        ("a value that most runs have is expected", "«expected or →»max(", "what_is_changed"),
        ("a run on another machine is no matter", "keys.union(«*[MACHINE & run.environment.keys() "
         "for run in pair]→»)", "what_is_changed"),
        ("figures agree in two digits", "{float(x):«.9g→.2g»}", "changed_field")],
    ("records/tools/judge.py", "test_judge.py"): [
        ("the larger E decides", "np.«minimum→maximum»(e_value"),
        ("half of a rule's p", "p = «float(→0.5 * float(»stats.ttest_1samp")],
    ("records/tools/judge.py", "test_compare.py"): [
        ("any gain is better", 'if «is_sure(test, found["level"])→test["difference"]»:',
         "intervals_"),
        ("one equal pair is no effect", "or «any→all»(one != other", "words_of"),
        ("a seed that ran twice is a pair", "« and seeds[run.seed] == 1→»}", "p_value_of")],
    ("records/tools/logs.py", "test_logs.py"): [
        ("seconds taken for milliseconds", 'if «unit == "ms"→True» else', "published_log"),
        ("a step where a run was resumed stands twice", ">= step« + validated→»]", "one_run")],
    ("records/tools/compare.py", "test_compare.py"): [
        ("a log that cannot be read is status 0", "else «1 if unread else →»0", "costs_one_line"),
        ("a share of the candidate's time", "max(«b→a».seconds", "words_of")],
    ("records/tools/ablate.py", "test_ablate.py"): [
        ("many parts have the level of one", "--level={options.level« / len(parts)→»}", "pays")],
    ("records/tools/night.py", "test_night.py"): [
        ("a winner is raced on the same seeds again", "options.seed« + AGAIN→»}", "climbs"),
        ("the first idea has all hours", "min(1, «len(self.places) / turns→1»)", "shared")],
    ("records/tools/kept.py", "test_race.py"): [
        ("a kept run is made again", "return «run_in(store, entry, seed) or →»make()", "runs_once")],
    ("records/tools/bench.py", "test_bench.py"): [
        ("seconds, said to be milliseconds", "else «1000 * →»(end - begin)", "its_units"),
        ("tokens a millisecond, said to be a second", "«1000 * one→one»['tokens'] /", "its_units"),
        ("the first steps count", "slice(«UNTIMED, UNTIMED + →»steps)", "its_units")],
    ("records/tools/honesty.py", "test_honesty.py"): [
        ("a copy that is not honest is status 0", "{seen}\")\n        return «3→0»", "program")],
    ("records/tools/same.py", "test_same.py"): [
        ("a small difference is none", "BOUND = «1e-9→1e-3»", "mistake"),
        ("weights that differ", "self.weights[new].view(-1)[part] = «→2 * »base", "other_words")],
    ("records/tools/exam.py", "test_exam.py"): [
        ("the loss of the log is believed", "abs(loss - «self.run.loss→loss»)", "cheating"),
        ("the first steps are not trained again", "train_again(0, «FIRST→0»)", "cheating"),
        ("validation may change things", "not torch.equal(«x.cpu()→before[kind][name]», b", "cheating")],
    ("records/tools/trial.py", "test_exam.py"): [
        ("a file that was not given may be opened", "elif «name not in allowed→False» and", "opened")],
    ("records/tools/sample.py", "test_sample.py"): [
        ("the seed draws nothing", "manual_seed(«args.seed→0»)", "a_seed_gives"),
        ("the oldest checkpoint is taken", "return found[«-1→0»]", "newest_ch")],
    ("records/tools/ledger.py", "test_ledger.py"): [
        ("twice the rate", "value <= «RATE→2 * RATE» and"),
        ("a line that was cut spoils the next", 'before = "«\\n→»"  #', "others_did")],
    ("records/tools/page.py", "test_page.py"): [
        ("a log can write the page's HTML", "return «html.escape→»(short(str", "changes_nothing")],
    ("records/tools/plot.py", "test_plot.py"): [
        ("thousands of tokens, said to be millions", 'size = «1e6→1e3» if', "thin_line")],
    ("records/tools/tables.py", "test_compare.py"): [
        ("thousands of tokens, said to be millions", '(1e3, "«k→M»")', "table_of_runs")],
    ("records/tools/submission.py", "test_compare.py"): [
        ("a run's seconds, said to be milliseconds", "{«1000 * →»one.seconds:", "statistics_of")],
    ("records/tools/load.py", "test_launch.py"): [
        ("another encoding is taken", 'encoding="«utf-8→latin-1»"', "another_encoding")],
    ("records/tools/leash.py", "test_race.py"): [
        ("a program outlives the one that started it", "prctl(1, «SIGTERM→0»,", "interrupted")],
    ("records/tools/leash.py", "test_watch.py"): [
        ("a traceback begins in the leash", "«own.tb_frame.f_code.co_filename != script→False»",
         "leashed_script")]}

def mutants_in(program: str, section: int, file: str, rows) -> list[Mutant]:
    return [Mutant(program, section, file, "".join(test), mistake,
                   *(re.sub("(?s)«(.*?)→(.*?)»", side, marked) for side in (r"\1", r"\2")))
            for mistake, marked, *test in rows]

MUTANTS = [mutant for place, rows in IN_THE_SCRIPT.items()
           for mutant in mutants_in("train_gpt.py", *place, rows)]
MUTANTS += [mutant for (program, file), rows in IN_PROGRAMS.items()
            for mutant in mutants_in(program, 0, file, rows)]

def first_failure(mutant: Mutant, folder: Path, quick: bool) -> str:
    """The first test that fails in the folder, a copy of the repository, when the mistake is
    planted, or "" if none does."""
    program = folder / mutant.program
    right = program.read_text()
    if right.count(mutant.text) != 1:
        sys.exit(f"error: the text of '{mutant.mistake}' does not stand once in {mutant.program}")
    program.write_text(right.replace(mutant.text, mutant.wrong))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-k", mutant.test,
               *(["-m", "quick"] if quick else ["--all"]), f"tests/{mutant.file}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    program.write_text(right)
    failed = re.search(r"(?m)^FAILED tests/(.+?)(?: - .*)?$", done.stdout)
    if quick and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return ""
    if done.returncode not in (0, 1) or bool(failed) != (done.returncode == 1):
        sys.exit(f"{mutant.mistake}: the tests did not run\n{done.stdout}{done.stderr}")
    return failed[1] if failed else ""

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="mistakes with this word")
    parser.add_argument("--quick", action="store_true", help="by the tests of `quick` alone")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in " ".join(map(str, mutant))]
    if not chosen:
        parser.error(f"--only={options.only}: no mistake has this word")
    survivors = []
    print("| program | mistake | found by |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "repository"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", "*.pt", "*.bin", "race_*"))
        for mutant in chosen:
            test = first_failure(mutant, folder, options.quick)
            survivors += [mutant.mistake] * (not test)
            place = f"{mutant.program} {mutant.section or ''}".rstrip()
            print(f"| {place} | {mutant.mistake} | `{test}` |", flush=True)
    sys.exit("\n".join(f"error: no test finds the mistake '{name}'" for name in survivors) or 0)

if __name__ == "__main__":
    main()
