"""Ideas that people try first, each as a naive edit of a copy of the script: it trains, resumes to
the same losses, or is refused by a line that names what is missing."""

import math
import re
import pytest
import torch
from conftest import (TINY, edited, launch, load_checkpoint, load_script, log_of, losses, refused,
                      train)
import train_gpt

FC = "        self.fc = CastedLinear(dim, 4 * dim)\n"
HEAD = "        self.lm_head = CastedLinear(hp.model_dim, vocab, gradient_scale)\n"
MIX = "        self.value_mix = nn.Parameter("
ATTENTION = "        y_1HTK = attend(q, k, v, mask, self.hp.attention_scale)\n"
TABLE = "PARAMETERS = [\n«→    {},\n»"

# Edits, as conftest.edited takes them.
SWIGLU = [FC + "«→        self.gate = CastedLinear(dim, 4 * dim)\n»",
          "self.proj(«F.relu(self.fc(x_TD)).square()→F.silu(self.gate(x_TD)) * self.fc(x_TD)»)"]
SWIGLU_ROW = TABLE.format(r"(r'layers\..*\.gate\.weight', uniform, 'Muon', dict(lr='muon_lr'))")
HEAD_GATE = ["«→        self.head_gate = CastedLinear(hp.model_dim, hp.num_heads)\n»" + MIX,
             ATTENTION + "«→        gate_HT = torch.sigmoid(self.head_gate(x_TD)).T\n"
             "        y_1HTK = y_1HTK * gate_HT[None, :, :, None]\n»"]
HEAD_GATE_ROW = TABLE.format(r"(r'layers\..*\.head_gate\.weight', zero, 'Adam', dict(lr=0.01))")
HEAD_SCALES = [  # float32, like all vectors
    "«→        self.head_mix = nn.Parameter(torch.ones(hp.num_heads))\n»" + MIX,
    ATTENTION + "«→        y_1HTK = y_1HTK * self.head_mix[:, None, None]\n»"]
NO_HEAD_ROW = r"""    «→# »(r"lm_head\.weight","""
LION = ["""\
«→class Lion(Adam):
    def update(self, step):
        for p, gradient, mean in zip(self.params.values(), self.pending_sums,
                                     self.state["mean"]):
            gradient, mean = gradient.wait(), self.world.shard(mean)
            update = mean.lerp(gradient, 1 - self.betas[0]).sign()
            self.world.shard(p.detach()).sub_(self.lr(step) * update)
            mean.lerp_(gradient, 1 - self.betas[1])
        self.pending_params = [self.world.all_gather(p.detach()) for p in self.params.values()]

»class Muon(Optimizer):
""", 'zero,    «"Adam", dict(lr="lm_head_lr")→"Lion", dict(lr=0.001, betas=(0.9, 0.99))»',
        'normal,  «"Adam", dict(lr="embed_lr")→"Lion", dict(lr=0.01, betas=(0.9, 0.95))»']
AVERAGE = [  # as buffers of the model, so a part of what is saved
    HEAD + """\
«→        for name, p in list(self.named_parameters()):
            self.register_buffer(f'average_{name}'.replace('.', '_'),
                                 torch.zeros_like(p, dtype=torch.float32))
»""", """\
            optimizer.finish(step)
«→    with torch.no_grad():
        for name, p in model.named_parameters():
            getattr(model, f"average_{name}".replace(".", "_")).lerp_(p.float(), 0.25)
»    model.zero_grad("""]
GROWING = [  # at the places that the comment in Hyperparameters names
    """\
    return «done * hp.tokens_per_step
→sum(step_tokens(s, hp) for s in range(done))

def step_tokens(step: int, hp: Hyperparameters) -> int:
    return hp.tokens_per_step // (2 if step < hp.num_iterations // 2 else 1)
»""", "«→    step = 0\n»    for epoch in range(hp.epochs):\n",
    " start += «hp.tokens_per_step→step_tokens(step, hp)\n                step += 1»\n",
    "                yield shard, last\n«→                step += 1\n»",
    "«    count = hp.micro_batches // world.size\n→»", """\
    for «shard, start in islice(step_starts(shards, hp), first_step, None):
→step, (shard, start) in islice(enumerate(step_starts(shards, hp)), first_step, None):
        count = step_tokens(step, hp) // T // world.size
»""", "window) / «hp.tokens_per_step→step_tokens(step, hp)»\n"]
Z_LOSS = ["""\
            loss += CrossEntropy.apply(self.logits(x), target)
«→            if self.training:
                loss += 1e-3 * self.logits(x).logsumexp(-1).square().sum()
»"""]
TORCHS_LINEAR = ["self.fc = «CastedLinear(dim, 4 * dim→nn.Linear(dim, 4 * dim, bias=False»)"]
LAMBDAS = ["self.«residual_mix→lambdas» = ",
           "self.«residual_mix→lambdas»[0] * x_TD + self.«residual_mix→lambdas»[1] * x0_TD"]

# What is refused at first, and by which words; then what else the edit needs.
IDEAS = {
    "another activation": (["self.proj(«F.relu(self.fc(x_TD)).square()→F.gelu(self.fc(x_TD))»)"],
                           None, []),
    "SwiGLU": (SWIGLU, r"no rule for layers\.0\.mlp\.gate\.weight \(128, 32\)", [SWIGLU_ROW]),
    "a gate per head": (HEAD_GATE, r"no rule for layers\.0\.attn\.head_gate\.weight \(2, 32\)",
                        [HEAD_GATE_ROW]),
    "a tied head": ([HEAD + "«→        self.lm_head.weight = self.embed.weight\n»"],
                    r"no parameter follows the rule lm_head\\\.weight", [NO_HEAD_ROW]),
    "Lion": (LION, None, []), "averaged weights": (AVERAGE, None, []),
    "a growing batch": (GROWING, None, []), "z-loss": (Z_LOSS, None, []),
    "torch's linear layer": (TORCHS_LINEAR, r"layers\.0\.mlp\.fc\.weight has values", None),
    "lambdas": (LAMBDAS, r"no rule for layers\.0\.lambdas \(2,\)",
                [r"layers\.\d+\..*«_mix→(_mix|lambdas)»"])}

def loaded(folder, *edits):
    path = edited(folder / "edited.py", *edits, script=train_gpt.__file__)
    return load_script(path, "edited")

@pytest.mark.parametrize("edits, words, mended", IDEAS.values(), ids=IDEAS)
def test_an_idea_is_refused_by_name_or_trains_and_resumes(edits, words, mended, tmp_path, shards):
    if words:
        script = loaded(tmp_path, *edits)
        with refused(words):
            train(script, *TINY, *shards, "--check")
    if mended is None:
        return
    script = loaded(tmp_path, *edits, *mended)
    train(script, *TINY, *shards, f"--records={tmp_path}/a", "--save_every=3")
    checkpoint = min(tmp_path.glob("a/*/step*.pt"))
    train(script, f"--resume={checkpoint}", f"--records={tmp_path}/b")
    first, middle, last = losses(log_of(tmp_path / "a"))
    assert math.isfinite(first) and last < middle < first
    assert losses(log_of(tmp_path / "b")) == [middle, last]
    whole, resumed = (load_checkpoint(tmp_path / run)["state"] for run in "ab")
    assert ("Lion mean" in whole) == (edits is LION)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)

def test_a_vector_that_lacks_a_cast_is_refused(tmp_path, shards):
    flags = [*TINY, *shards, f"--records={tmp_path}"]
    script = loaded(tmp_path, *HEAD_SCALES)
    train(script, *flags)
    with refused(r"layer 0 or x0 needs a type_as", AssertionError):
        train(script, *flags, "--dtype=bfloat16")

def test_a_growing_batch_and_a_term_for_training_are_reported_right(tmp_path, shards):
    """At first all logits are 15, so that the log of the sum of their exponentials is known."""
    train(loaded(tmp_path, *GROWING, *Z_LOSS), *TINY, *shards, f"--records={tmp_path}")
    log = log_of(tmp_path)
    term = 1e-3 * (15 + math.log(320))**2
    assert losses(log)[0] == pytest.approx(math.log(320), abs=0.001)
    assert losses(log, "train_loss")[0] == pytest.approx(math.log(320) + term, abs=0.001)
    counts = re.findall(r"train_loss.* tokens:(\d+)", log)
    assert list(map(int, counts)) == [512, 1024, 1536, 2560, 3584, 4608]

def test_ideas_do_the_same_on_four_ranks(tmp_path, shards):
    edits = [*SWIGLU, SWIGLU_ROW, *HEAD_GATE, HEAD_GATE_ROW, *LION, *AVERAGE, *GROWING, *Z_LOSS]
    flags = [*TINY, *shards, "--save_every=6", "--micro_batches=8"]
    train(loaded(tmp_path, *edits), *flags, f"--records={tmp_path}/1")
    launch(*flags, f"--records={tmp_path}/4", ranks=4, script=tmp_path / "edited.py")
    one, four = (log_of(tmp_path / ranks) for ranks in "14")
    assert "\nranks: 1\n" in one and "\nranks: 4\n" in four
    for kind in ("val_loss", "train_loss"):
        assert losses(one, kind) == pytest.approx(losses(four, kind), abs=2e-4)
    weights = [load_checkpoint(tmp_path / ranks)["state"]["model"] for ranks in "14"]
    torch.testing.assert_close(*weights, rtol=0, atol=0.02)

OWN = [HEAD + "«→        self.own = parameter(2, 3)\n»",
       TABLE.format("('own', normal, 'Muon', dict(lr=0.1))")]

def test_a_parameter_that_nothing_uses_is_named(tmp_path, shards):
    with refused("no gradient reaches own:"):
        train(loaded(tmp_path, *OWN), *TINY, *shards, f"--records={tmp_path}")

@pytest.mark.quick
@pytest.mark.parametrize("frozen", ["embed.weight", "layers.0.mlp.fc.weight", "skip_weights"])
def test_frozen_parameters_have_no_optimizer_and_the_others_train(tmp_path, shards, frozen):
    freeze = "".join(f"    model.get_parameter({name!r}).requires_grad_(False)\n"
                     for name in ("own", frozen))
    script = loaded(tmp_path, *OWN, "norm(self.embed(tokens_T))«→ * self.own.mean()»\n",
                    f"«→{freeze}»    optimizers = build_optimizers(")
    train(script, *TINY, *shards, f"--records={tmp_path}", "--save_every=3", "--micro_batches=2")
    paths = sorted(tmp_path.glob("*/step*.pt"))
    first, last = (torch.load(path, weights_only=True)["state"] for path in paths)
    unchanged = {name for name in first["model"]
                 if torch.equal(first["model"][name], last["model"][name])}
    assert unchanged == {"own", frozen}
    assert not any(unchanged & set(last[kind]) for kind in last if kind != "model")
    train(script, f"--resume={paths[0]}", f"--records={tmp_path}/again")
    torch.testing.assert_close(load_checkpoint(tmp_path / "again")["state"], last, rtol=0, atol=0)
