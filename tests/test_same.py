"""tools/same.py: what is written in other words is the same mathematics, and a mistake is not."""

import pytest
from conftest import ROOT, edited, launch
from mutants import MUTANTS

OTHER_WORDS = [
    "«2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))→c + self.tanh(x_TD, c)»\n",
    "«→    def tanh(self, x, c):\n        return c * (self.lm_head(x) / c).tanh()\n\n»class Layer(",
    "self.proj(«F.relu(self.fc(x_TD)).square()→self.fc(x_TD).clamp(min=0) ** 2»)",
    "return «F.embedding(tokens_T, self.weight.float())→self.weight.float()[tokens_T]»",
    """«scores = (scale * q_block) @ k[:, :, key_range].mT + bias.to(q.dtype)
        outputs.append(scores.softmax(-1) @ v[:, :, key_range])→keys, values = k[:, :, key_range], \
v[:, :, key_range]
        y = F.scaled_dot_product_attention(q_block, keys, values, bias, scale=scale)
        outputs.append(y)»""",
    "polynomial = «torch.baddbmm(gram, gram, gram, beta=b, alpha=c)→b * gram + c * gram @ gram»",
    "(rule, *_), params in «→reversed(»groups.items()«→)»:",  # optimizers in another order
    """«for gradient, p in zip(self.gradients, self.params.values()):
            gradient.copy_(p.grad)→grads = torch.stack([p.grad for p in self.params.values()])
        self.gradients[:len(grads)] = grads»""",
    """tokens = «read_tokens(shard.path, start, count * T + 1, hp.vocab_size).view(torch.int16)→\
np.fromfile(shard.path, "<i2", count * T + 1, offset=1024 + 2 * start)
        tokens = torch.from_numpy(tokens)»"""]
OTHER_NAMES = [
    "self.«residual_mix→mix» = ", "self.«residual_mix→mix»[0] * x_TD + self.«residual_mix→mix»[1]",
    r"(«embed|value_tables\.\d→embed|value_table»)\.weight", r"layers\.\d+\..*«_→»mix",
    "self.value_table«s = nn.ModuleDict({d: Embedding(vocab, width, dtype) for d in digits})"
    "→ = Embedding(3 * vocab, width, dtype)»",
    """«value_embed_of = {digit: table(tokens_T) for digit, table in self.value_tables.items()}→\
rows = torch.cat([tokens_T + i * len(self.embed.weight) for i in range(3)])
        value_embed_of = dict(zip("012", self.value_table(rows).chunk(3)))»"""]
MAPS = ["--map=residual_mix=mix", "--map=value_tables.0,value_tables.1,value_tables.2=value_table"]

def compared(folder, edits, *maps):
    """The status for a copy with these edits, and the last line that is printed."""
    script = ROOT / "train_gpt.py"
    copy = edited(folder / "copy.py", *edits, script=script)
    done = launch(copy, f"--vs={script}", *maps, script=ROOT / "records" / "tools" / "same.py",
                  check=False)
    return done.returncode, (done.stdout or done.stderr).splitlines()[-1]

def test_other_words_and_other_names_are_the_same_mathematics(tmp_path):
    assert compared(tmp_path, OTHER_WORDS) == (0, "same mathematics")
    assert compared(tmp_path, OTHER_NAMES, *MAPS) == (0, "same mathematics")

@pytest.mark.parametrize("mistake, place", [
    ("the window grows half a block too far", "losses, step 2: micro-batch 1 "),
    ("a block that a border crosses is called full", "lists of blocks, text "),
    ("all tokens have the softmax of the first", "gradients, step 0: lm_head.weight "),
    ("Adam's bias correction is one step late", "updates, step 0: lm_head.weight "),
    ("a rank reads another's tokens", "loader, step 0, rank 1 of 2: "),
    ("targets of -1 are counted", "validation loss, ")])
def test_a_mistake_is_found_where_it_is(mistake, place, tmp_path):
    (text, wrong), = [(m.text, m.wrong) for m in MUTANTS if m.mistake == mistake]
    status, line = compared(tmp_path, [f"«{text}→{wrong}»"])
    assert status == 3 and line.startswith(f"not same mathematics: {place}"), line

@pytest.mark.parametrize("edits, error", [
    (OTHER_NAMES, "and layers.0.mix, layers.1.mix of {} pair with none: add --map=OLD=NEW or --map="
     "A,B=NEW if they are the same"), (["def evaluate«→s»(model"], "because it has no evaluate")])
def test_what_cannot_be_compared_is_one_line(edits, error, tmp_path):
    status, line = compared(tmp_path, edits)
    assert status == 2 and line.endswith(error.format(tmp_path / "copy.py")), line
