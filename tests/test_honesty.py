"""tools/honesty.py: it finds each planted way to a loss that is too low, and no right idea."""

import sys
from pathlib import Path
import pytest
from conftest import ROOT
from test_data_common import status_of
from test_edits import HEAD_GATE, HEAD_GATE_ROW, IDEAS, NO_HEAD_ROW, Z_LOSS, loaded
import train_gpt
from records.tools import honesty

@pytest.fixture
def changed(tmp_path):
    return lambda *edits: Path(loaded(tmp_path, *edits).__file__)

def test_the_script_is_honest(runs_here):
    assert [line.partition(":")[0] for line in honesty.check(train_gpt.__file__)] == [
        "masks", "runs", "exam", "processes"]

@pytest.mark.method
@pytest.mark.parametrize("edit", [
    "(key <= query) &«→ (query - key < 200) &»",  # also in full blocks
    "(distance_NN > 0) & («first_N→last_N» == last_N", "key_range = slice(«→128 + »int(visible"])
def test_masks_that_differ_between_a_cpu_and_a_gpu_are_found(tmp_path, changed, edit):
    with pytest.raises(honesty.Seen, match="are visible on a CPU or on a GPU only"):
        list(honesty.check_masks(honesty.Trial(changed(edit), [], tmp_path)))

EVALUATE = "    model.eval()\n«→    {}\n»"
GLOBAL = "«→{}\n»BLOCK = 128  # tokens"
ENTROPY = "its log has a validation loss of .* its checkpoint has"
RESUMED = "resumed at step 12, and validates at other steps, ends with other numbers"
PLANTED = {  # test_exam.py has more of what the exam finds
    "the targets are the inputs": (ENTROPY, [
        "x_TD = self.features(«tokens_T→targets_T.clamp(min=0).int()», window)"]),
    "the number of documents that follow": (
        r"what the model says before token \d+ changes by .* it sees the future", [
            "«→ends = (tokens_T.flip(0) == self.end_of_text).cumsum(0).flip(0)[:, None]\n        »"
            "x_TD = x0_TD = norm(self.embed(tokens_T))«→ * (1 + 0.1 * ends.sin())»"]),
    "hard targets are left out": (ENTROPY, [
        "total[0] += model(inputs_T, targets_T«→.where(targets_T != 10, -1)», window)"]),
    "dropout on in validation": (RESUMED, [
        "self.proj(«→F.dropout(»F.relu(self.fc(x_TD)).square()«→, 0.1)»)"]),
    "an average overwrites the weights": (RESUMED, [GLOBAL.format("AVERAGE = {}"), EVALUATE.format(
        "for p in model.parameters():\n"
        "        p.copy_(AVERAGE.setdefault(p, p.clone()).lerp_(p, 0.5))")]),
    "momentum outside the state": (RESUMED, [
        '«self.state["momentum"]→self.momentum» = torch',
        '«self.state["momentum"]→self.momentum»']),
    "dropout in training, whose random state is not saved": (RESUMED, [
        "self.proj(«→F.dropout(»F.relu(self.fc(x_TD)).square()«→, 0.1, self.training)»)"]),
    "rates that count the validations": (RESUMED, [
        GLOBAL.format("SEEN = []"), EVALUATE.format("SEEN.append(step)"),
        "return «→0.99**len(SEEN) * »self.peak_lr * "]),
    "processes that read the same data": ("_loss at step [2-8] is .* on one process and", [
        "«        start += world.rank * count * T\n→»"])}
@pytest.mark.method
@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name, tmp_path, changed, runs_here):
    words, changes = PLANTED[name]
    trial = honesty.Trial(changed(*changes), [], tmp_path)
    check = honesty.check_processes if "processes" in name else honesty.check_run
    with pytest.raises(honesty.Seen, match=words) as seen:
        list(check(trial))
    assert "\n" not in str(seen.value)

RIGHT = {
    "another softcap, a tied head, a mean of the tokens so far, other targets in training, no "
    "document masks, and a longer window in validation": [
        "(key <= query)« & (document_T[query] == document_T[key])→»",
        "total[0] += model(inputs_T, targets_T, «→2 * »window)",
        *IDEAS["a tied head"][0], NO_HEAD_ROW,
        "return «2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))→"
        "30 * torch.tanh(self.lm_head(x_TD).float() / 30)»",
        "«return add(x_TD, self.mlp(norm(x_TD)))→"
        "mean = x_TD.cumsum(0) / torch.arange(1, len(x_TD) + 1)[:, None]\n"
        "        return x_TD + 0.1 * mean.type_as(x_TD) + self.mlp(norm(x_TD))»",
        "loss += CrossEntropy.apply(self.logits(x), target)\n«→            if self.training:\n"
        "                loss += 0.1 * CrossEntropy.apply(self.logits(x), target.roll(1))\n»"],
    "GELU, gated attention, the token before, weight decay, z-loss in training, other windows": [
        *IDEAS["another activation"][0], *HEAD_GATE, HEAD_GATE_ROW, *Z_LOSS,
        "«→        self.embed2 = Embedding(vocab, hp.model_dim, dtype)\n»        self.embed = ",
        "x_TD = x0_TD = norm(self.embed(tokens_T)«→ + self.embed2(F.pad(tokens_T[:-1], (1, 0)))»)",
        'r"(embed«→2?»|value', "«→p.mul_(0.99)\n            »p.add_(update, alpha=-self.lr(step))",
        "(window // BLOCK // «2→3»)", "window_end=«256→512», num_it"]}

@pytest.mark.method
@pytest.mark.parametrize("name", RIGHT)
def test_right_ideas_pass(name, changed, runs_here):
    parts = [honesty.check_run, *[honesty.check_processes] * ("GELU" in name)]
    assert len([*honesty.check(changed(*RIGHT[name]), parts=parts)]) == len(parts) + 1

@pytest.mark.method
def test_the_weights_of_a_copy_are_those_of_the_script(changed):
    def weights(path, *flags):
        return dict(line.split()[1:] for line in honesty.check(path, flags, [honesty.weights]))
    copy = changed(*IDEAS["another activation"][0])
    assert weights(copy) == weights(ROOT / "train_gpt.py") != weights(copy, "--num_heads=2")

@pytest.mark.method
@pytest.mark.parametrize("words, status, message", [
    ("edited.py demo --peek=1 --num_iterations=3", 3, "not honest: what the model says "),
    ("", 2, "error: name the script first"),
    ("train_gpt.py --num_kv_heads=4", 2, "--num_kv_heads must divide --num_heads")])
def test_the_program(words, status, message, changed, monkeypatch, capsys, runs_here):
    """Here with a setting of a copy's own, which makes it dishonest."""
    monkeypatch.chdir(ROOT)
    copy = changed("«→    peek: int = flag(0, 'x')\n»    epochs: int",
                   "norm(self.embed(tokens_T))«→ + self.embed(tokens_T.roll(-1)) * self.hp.peek»")
    words = [str(copy) if word == copy.name else word for word in words.split()]
    monkeypatch.setattr(sys, "argv", ["honesty.py", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which the program changes
    assert status_of(honesty.main) == status
    out, err = capsys.readouterr()
    lines = (out if status == 3 else err).splitlines()
    assert message in lines[-1] and len(lines) == (3 if status == 3 else 1)
