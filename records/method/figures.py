"""Draws the figures of records/method.md with train_gpt.py's own functions and a committed log:

    python records/method/figures.py [FOLDER]

Each SVG names some of the numbers that it shows in its description. A test draws them again, and
fails if the committed figures or their captions have other numbers."""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt
from records.tools import logs

# The colour-blind can tell these apart.
BLUE, SKY, MIST, ORANGE, PALE = "#0072B2", "#56B4E9", "#C0E2F7", "#D55E00", "#E4E4E4"
STYLE = {"font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "legend.frameon": False,
         "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "figures"}
SPEEDRUN, DEMO = train_gpt.PRESETS["speedrun"], train_gpt.PRESETS["demo"]
DEMO_LOG = ROOT / "records" / "demo" / "train_gpt" / "2026-11-28T21-26-07Z_train_gpt.log"

def canvas(width: float, height: float, rows=1, columns=1, **options):
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)

def text_tokens() -> torch.Tensor:
    """tests/text.txt as bytes, in whole blocks. Its story and two shorter texts are documents."""
    text = (ROOT / "tests" / "text.txt").read_bytes()
    starts = [text.index(words) for words in (b"The harbour", b"A list that", b"The ferry leaves")]
    documents = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]
    tokens = [token for document in documents for token in (256, *document)]
    return torch.tensor(tokens[:len(tokens) // train_gpt.BLOCK * train_gpt.BLOCK])

def masks() -> tuple[Figure, list[str]]:
    """The blocks of keys that each block of queries attends to, at three steps of a speedrun."""
    tokens = text_tokens()
    figure, places = canvas(8.2, 3.9, columns=3, sharey=True)
    numbers = []
    for place, step in zip(places, (0, 885, 1770)):
        window = torch.tensor(train_gpt.window_tokens(step, SPEEDRUN))
        mask, _ = train_gpt.build_block_masks(tokens, 256, window, flex=True)
        kinds = np.zeros(2 * (len(tokens) // train_gpt.BLOCK,), dtype=int)
        for kind, counts, keys in ((1, mask.kv_num_blocks, mask.kv_indices),
                                   (2, mask.full_kv_num_blocks, mask.full_kv_indices)):
            for query, count in enumerate(counts[0, 0]):
                kinds[query, keys[0, 0, query, :count]] = kind
        place.imshow(kinds, cmap=ListedColormap([PALE, ORANGE, BLUE]), vmin=0, vmax=2)
        skipped, partial, full = np.bincount(kinds.flatten(), minlength=3)
        place.set(xlabel="key block", title=f"step {step}: window {window} tokens\n"
                  f"{partial} partial, {full} full blocks")
        numbers.append(f"{skipped:,}")
    places[0].set_ylabel("query block")
    figure.legend([Patch(color=colour) for colour in (ORANGE, BLUE, PALE)],
                  ["partial", "full", "skipped"], loc="outside lower center", ncols=3)
    return figure, numbers

def schedules() -> tuple[Figure, list[str]]:
    """What changes from step to step in a speedrun."""
    steps = range(SPEEDRUN.num_iterations + 1)
    figure, (rates, momentum, windows) = canvas(7.5, 4.6, rows=3, sharex=True)
    factors = [train_gpt.lr_factor(step, SPEEDRUN) for step in steps]
    rates.plot(steps, factors, color=BLUE)
    rates.set(ylabel="factor on all\nlearning rates", ylim=(0, 1.1))
    momentum.plot(steps, [train_gpt.muon_momentum(step, SPEEDRUN) for step in steps], color=BLUE)
    momentum.set(ylabel="Muon's\nmomentum", ylim=(0.84, 0.96))
    long = np.array([train_gpt.window_tokens(step, SPEEDRUN) for step in steps])
    short = np.maximum(long // train_gpt.BLOCK // 2, 1) * train_gpt.BLOCK
    windows.step(steps, long, color=BLUE, label="long")
    windows.step(steps, short, color=ORANGE, label="short")
    windows.set(ylabel="attention window\n(tokens)", xlabel="step", ylim=(0, 1900))
    windows.legend()
    return figure, [str(factors.count(1) - 1), str(long[500]), str(long[1000])]

def network() -> tuple[Figure, list[str]]:
    """How the layers are connected. To find the skips, it adds 1 to each skip weight in turn. The
    input of one layer then grows by the output of an earlier layer, and these two are connected."""
    hp = replace(SPEEDRUN, model_dim=32, num_heads=1, head_dim=32, vocab_size=257)
    model = train_gpt.GPT(hp, torch.float64, flex=False)
    seen = {}  # {layer: (its input, its output)}
    for n, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda layer, args, out, n=n: seen.update({n: (args[0], out)}))
    skips = []
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        for skip_weight in model.skip_weights:
            model.features(text_tokens()[:256], torch.tensor(128))
            before = dict(seen)
            skip_weight.add_(1)
            model.features(text_tokens()[:256], torch.tensor(128))
            skip_weight.sub_(1)
            end = min(n for n in seen if not torch.equal(seen[n][0], before[n][0]))
            added = seen[end][0] - before[end][0]
            skips += [(n, end) for n in range(end) if torch.allclose(seen[n][1], added)]
    figure, place = canvas(7.5, 4.8)
    half = len(model.layers) // 2
    kinds = {"L": ("long window", SKY), "S": ("short window", MIST), ".": ("no attention", PALE)}
    where = [(0, -n) if n < half else (1, n + 1 - 2 * half) for n in range(2 * half)]
    for n, (x, y) in enumerate(where):
        words, colour = kinds["." if hp.attention[n] == "." else hp.windows[n]]
        place.text(x, y, f"layer {n}: {words}", ha="center", va="center",
                   bbox=dict(boxstyle="round,pad=0.45", color=colour))
        if hp.value_embeds[n] != ".":
            place.text(1.9 * x - 0.45, y, f"value\nembedding {hp.value_embeds[n]}", ha="center",
                       va="center", color=ORANGE)
    for (x, y), (next_x, next_y) in zip(where, where[1:]):
        ahead = next_y - y  # 0 between the two halves, where the arrow runs below both layers
        style = f"arc3,rad={0 if ahead else 0.12}"
        place.annotate("", (next_x, next_y - 0.22 * (ahead or 1)), (x, y + 0.22 * (ahead or -1)),
                       arrowprops=dict(arrowstyle="->", connectionstyle=style))
    for start, end in skips:
        place.annotate("", (0.72, where[end][1]), (0.28, where[start][1]),
                       arrowprops=dict(arrowstyle="->", color=BLUE))
    for x, words in enumerate(("token embedding", "output head")):
        place.text(x, 0.6, words, ha="center")
    place.set(xlim=(-0.62, 1.62), ylim=(-half + 0.4, 0.9))
    place.axis("off")
    return figure, [f"{start} to {end}" for start, end in sorted(skips)]

def orthogonalization() -> tuple[Figure, list[str]]:
    """The singular values of a momentum after 0 to 5 Newton-Schulz steps."""
    hp = replace(DEMO, dtype="float32", micro_batches=1, vocab_size=257)  # bytes
    cpu = train_gpt.World(rank=0, size=1, device=torch.device("cpu"))
    model = train_gpt.GPT(hp, torch.float32, flex=False)
    train_gpt.draw_weights(model, seed=1)
    optimizers = train_gpt.build_optimizers(model, hp, cpu)
    tokens, T = text_tokens(), hp.train_seq_len
    batches = [*zip(tokens[:5 * T].int().split(T), tokens[1:5 * T + 1].long().split(T))]
    for step in range(20):
        train_gpt.train_step(model, [batches[step % 5]], optimizers, step, hp, cpu)
    state = train_gpt.gather_training_state(model, optimizers)
    momentum = state["Muon momentum"]["layers.1.mlp.fc.weight"]
    figure, place = canvas(7.5, 3.8)
    smallest = []
    for steps in range(6):
        values = torch.linalg.svdvals(train_gpt.newton_schulz(momentum[None], steps)[0])
        place.semilogy(range(1, len(values) + 1), values, color=BLUE if steps else ORANGE)
        place.text(130, values[-1], f"after {steps}" if steps else "before", va="center")
        smallest.append(f"{values[-1]:.1g}")
    place.set_yticks([1, 0.1, 0.01, 0.001], ["1", "0.1", "0.01", "0.001"])
    place.set(xlabel="singular values, the largest first", ylabel="size", xlim=(1, 128))
    return figure, [smallest[0], smallest[-1]]

def softcap() -> tuple[Figure, list[str]]:
    """What the loss sees of the head's logits, and how much of its gradient comes back."""
    figure, (value, slope) = canvas(7.5, 3.2, columns=2)
    z = torch.linspace(-60, 60, 241, requires_grad=True)
    for cap, colour in ((30.0, ORANGE), (15.0, BLUE)):
        model = train_gpt.GPT(replace(DEMO, lm_head_softcap=cap), torch.float32, flex=False)
        model.lm_head = torch.nn.Identity()
        (gradient,) = torch.autograd.grad(model.logits(z).sum(), z)
        value.plot(z.detach(), model.logits(z.detach()) - cap, color=colour, label=f"c = {cap:g}")
        slope.plot(z.detach(), gradient, color=colour)
        shares = [f"{100 * gradient[z == x].item():.0f} %" for x in (15, 30)]
    value.plot((-35, 35), (-35, 35), color="black", linewidth=1, linestyle=":", label="no cap")
    value.set(xlabel="logit z from the head", ylabel="logit that the loss sees\n(less c)")
    value.legend()
    slope.set(xlabel="logit z from the head", ylabel="slope: share of the\ngradient that passes")
    return figure, shares

def loss() -> tuple[Figure, list[str]]:
    """The losses of a demo."""
    run = logs.read_run(DEMO_LOG, DEMO_LOG.stem)
    losses = {line.step: line.loss for line in run.lines if line.kind == "train"}
    means = np.convolve([*losses.values()], np.ones(31) / 31, mode="valid")
    figure, (start, rest) = canvas(8.2, 3.6, columns=2, width_ratios=(1, 2))
    start.plot(range(1, 101), [losses[step] for step in range(1, 101)], color=BLUE)
    rest.plot(losses.keys(), losses.values(), color=SKY, lw=0.5, label="one step")
    rest.plot(range(16, run.total - 14, 5), means[::5], color=BLUE, lw=2, label="mean of 31 steps")
    steps, values = zip(*[(line.step, line.loss) for line in run.validations])
    rest.plot(steps, values, "o", color=ORANGE, label="validation")
    falls = [train_gpt.lr_factor(step, DEMO) for step in range(run.total)].count(1) - 1
    rest.axvspan(falls, run.total, color=PALE)
    rest.text(falls + 8, 1.84, "the learning rates fall")
    for place, number, x, y in ((start, 1, 5, 6.9), (start, 2, 11, 5.6), (start, 3, 70, 4.4),
                                (rest, 4, 250, 3.15), (rest, 5, 620, 2.6)):
        place.text(x, y, number, bbox=dict(boxstyle="circle,pad=0.2", color="black"), color="white")
    start.set(xlabel="step", ylabel="loss (nats a token)", ylim=(3, 7.2))
    rest.set(xlabel="step", xlim=(100, run.total + 10), ylim=(1.8, 3.8))
    rest.legend()
    return figure, [str(falls), *(f"{value:.2f}" for value in values[::3])]

if __name__ == "__main__":
    torch.set_num_threads(1)
    matplotlib.rcParams.update(STYLE)
    for draw in (masks, schedules, network, orthogonalization, softcap, loss):
        figure, numbers = draw()
        path = Path(sys.argv[1] if len(sys.argv) > 1 else HERE, f"{draw.__name__}.svg")
        figure.savefig(path, metadata={"Date": None, "Description": "; ".join(numbers)})
