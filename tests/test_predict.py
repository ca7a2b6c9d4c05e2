"""records/predict.py and records/gpu_step.py: what planted slowdowns cost, by hand and as
predicted; how launches become times; and what is refused. What is predicted of published scripts
stands in records/techniques/README.md."""

import importlib.metadata
import json
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT, launch, refused
from test_interpreted import why_not

from data.common import UserError
from records import predict
from records.predict import Collective, Launch, Notes, Rates, Step, Wait

FEW_LAYERS = ["--windows=LSSL", "--value_embeds=0..0", "--attention=xx.x"]
T, D, V = 48 * 1024, 768, 50304  # of the speedrun
STREAM = 2 * T * D  # bytes of the residual stream, in bfloat16
RATES = Rates()

COPY = '''
@torch.library.custom_op("planted::copy", mutates_args=())
def copied(x: Tensor) -> Tensor:
    return x.clone()

copied.register_fake(lambda x: torch.empty_like(x))
copied.register_autograd(lambda ctx, gradient: copied(gradient))

class Block(nn.Module):'''
SLOWDOWNS = {
    "none": [],
    # A copy that the compiler cannot leave out, in each layer.
    "copy": [("class Block(nn.Module):", COPY),
             ("x_TD = self.residual_mix[0] * x_TD", "x_TD = self.residual_mix[0] * copied(x_TD)")],
    "float32 stream": [
        ("x_TD = x0_TD = norm(self.embed(tokens_T))",
         "x_TD = x0_TD = norm(self.embed(tokens_T)).float()"),
        ("self.attn(norm(x_TD),", "self.attn(norm(x_TD).bfloat16(),"),
        ("self.mlp(norm(x_TD))", "self.mlp(norm(x_TD).bfloat16())"),
        ("return norm(x_TD)\n", "return norm(x_TD).bfloat16()\n"),
        ("assert x_TD.dtype == self.embed.weight.dtype", "assert x_TD.dtype == torch.float32"),
    ],
    # One more loop over the logits of each token.
    "looped reduction": [
        ("return 2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))",
         "z = self.lm_head(x_TD)\n"
         "        z = z - z.detach().amax(-1, keepdim=True)\n"
         "        return 2 * c * torch.sigmoid(z.float() * (2 / c))")],
}


def with_slowdown(folder: Path, name: str) -> Path:
    text = SCRIPT.read_text()
    for before, after in SLOWDOWNS[name]:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(text)
    return path


def wrote(capsys, *arguments):
    predict.main([str(word) for word in arguments])
    return capsys.readouterr().out


def hand(gigabytes: float) -> float:
    """Milliseconds for so many GB."""
    return 1000 * gigabytes * 1e9 / RATES.memory * RATES.unseen


# -------- The program of a script
@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """slowdown -> its prediction, in four layers."""
    folder = tmp_path_factory.mktemp("scripts")
    paths = [str(with_slowdown(folder, name)) for name in SLOWDOWNS]
    notes = predict.notes_of(paths, flags=FEW_LAYERS)
    return {name: predict.described(one, predict.GPUS["h100"])
            for name, one in zip(SLOWDOWNS, notes)}


needs_compiler = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def added(costs, name):
    """What a slowdown adds to each part, in ms, where it adds something."""
    none = costs["none"]["parts"]
    parts = {part: ms - none[part] for part, ms in costs[name]["parts"].items()}
    return {part: ms for part, ms in parts.items() if abs(ms) > 0.15}


@needs_compiler
def test_planted_slowdowns_are_seen_in_their_part_and_size(costs):
    """The limits are by hand, for four layers."""
    # Each layer copies the stream and its gradient. What the copy stands between is two kernels
    # instead of one, and so may move the stream twice more in each direction.
    copies = hand(4 * 2 * 2 * STREAM / 1e9)
    found = added(costs, "copy")
    assert set(found) == {"norms and elementwise"}
    assert copies < found["norms and elementwise"] < 3 * copies
    # The stream and its gradient have two bytes more, and are written and read at least once at
    # each half of a layer.
    found = added(costs, "float32 stream")
    widened = hand(4 * 2 * 2 * 2 * STREAM / 1e9)
    assert set(found) == {"norms and elementwise"}
    assert widened < found["norms and elementwise"] < 3 * widened
    # All logits are read once more, or twice where the other loops cannot stay together.
    found = added(costs, "looped reduction")
    once = hand(2 * T * V / 1e9)
    assert set(found) == {"head and loss"}
    assert 0.99 * once < found["head and loss"] < 2.2 * once


@needs_compiler
def test_the_products_and_the_memory_are_those_of_the_model(costs):
    """By hand: a layer has 12 D^2 weights, a third of them in attention, which one layer lacks;
    each is used in one product forward and in two backward. The head is in FP8."""
    weights = 4 * 8 * D * D + 3 * 4 * D * D
    at_least = 1000 * 3 * 2 * T * weights / RATES.bf16
    assert at_least < costs["none"]["parts"]["products"] < 1.15 * at_least
    logits = 2 * T * V  # bytes
    assert 2 * logits < costs["none"]["memory"] < 5 * logits


@needs_compiler
def test_a_step_grows_with_the_window(costs):
    rows = costs["none"]["at"]
    windows = [row["window"] for row in rows]
    assert windows == sorted(windows) and windows[0] == 128 and windows[-1] > 1500
    attention = [row["parts"]["attention"] for row in rows]
    assert attention == sorted(attention) and attention[-1] > 2 * attention[0]
    others = [row["ms"] - row["parts"]["attention"] for row in rows]
    assert max(others) - min(others) < 0.01


# -------- From launches to times
def parts(*notes, blocks=0.0):
    step = Step(0, blocks=blocks, notes=list(notes))
    return predict.step_parts(step, RATES, predict.GPUS["h100"].processors)


def test_a_kernel_takes_what_is_slowest():
    quick = dict(name="x", part="norms", bytes=2.9e9)
    assert parts(Launch(**quick))["norms"] == pytest.approx(hand(2.9), rel=0.01)
    bound = parts(Launch(**quick, special=2 * RATES.special * 1e-3))["norms"]
    assert bound == pytest.approx(2 * RATES.unseen, rel=0.01)
    product = Launch("mm", "products", 1e6, product=(1, 8192, 8448, 8192))  # 32 rounds of 132 tiles
    want = 1000 * 2 * 8192 * 8448 * 8192 / RATES.bf16 * RATES.unseen
    assert parts(product)["products"] == pytest.approx(want, rel=0.01)
    one_more = Launch("mm", "products", 1e6, product=(1, 8192, 8448 + 1, 8192))
    assert parts(one_more)["products"] > parts(product)["products"]


def test_attention_costs_by_its_blocks():
    launches = [Launch("flex", "attention", 0, attention="forward", heads=(6, 128))] * 2
    few, many = (parts(*launches, blocks=blocks)["attention"] for blocks in (1000, 3000))
    work = 1000 * 2 * 2 * 128**3 * 6 * 2000 / RATES.flex_forward * RATES.unseen
    assert many - few == pytest.approx(work)


def test_an_exchange_hides_behind_what_is_launched_before_the_wait():
    ms = RATES.link * 1e-3  # bytes that take 1 ms
    kernel = Launch("x", "norms", RATES.memory / RATES.unseen * 1e-3)
    alone = parts(Collective(ms), Wait(0))["exchange"]
    assert alone == pytest.approx(1, rel=0.02)
    hidden = parts(Collective(ms), kernel, kernel, Wait(0))
    assert hidden["exchange"] == 0 and hidden["norms"] == pytest.approx(2, rel=0.01)
    # Two collectives share the link.
    assert parts(Collective(ms), Collective(ms), Wait(1))["exchange"] == pytest.approx(2, rel=0.02)
    assert parts(Collective(ms), Collective(ms), Wait(0))["exchange"] == pytest.approx(1, rel=0.02)


def notes_with(ms: float) -> Notes:
    return Notes([Step(0, notes=[Launch("x", "norms", RATES.memory / RATES.unseen * ms / 1000)])],
                 0)


def test_a_full_run_takes_fewer_steps_of_another_length():
    row = dict(steps_later=-50.0, steps_interval=(-60.0, -40.0), steps_error=4.0,
               baseline_steps=1000)
    row["predicted"] = predict.full_run(notes_with(102), notes_with(100), row)
    assert row["predicted"]["ratio"] == pytest.approx(1.02, abs=1e-4)
    assert row["predicted"]["time"] == pytest.approx(0.95 * 1.02, abs=1e-4)
    assert 1e-5 < row["predicted"]["p"] < 0.01
    text = predict.about_full_run(row)
    assert "5.0 % fewer steps (4.0 to 6.0)" in text and "predicted 2.0 % slower" in text
    assert "may take 3.1 % less" in text
    row["steps_later"] = None
    row["predicted"] = predict.full_run(notes_with(102), notes_with(100), row)
    assert row["predicted"]["time"] is None and "not known" in predict.about_full_run(row)


def test_equal_scripts_have_the_ratio_1_for_certain():
    assert predict.ratio_of(notes_with(7), notes_with(7), predict.GPUS["h100"]) == (1, 0)


# -------- The command
def test_the_last_line_is_the_first_script_s(monkeypatch, capsys):
    monkeypatch.setattr(predict, "notes_of",
                        lambda paths, *rest: [notes_with(90 + 10 * i) for i in range(len(paths))])
    last = "predicted: 90.0 ms a step on 8 H100\n"
    assert wrote(capsys, "a.py").endswith(last)
    out = wrote(capsys, "a.py", "--vs=b.py")
    assert out.endswith(last) and "a.py takes 0.900 of the time of b.py" in out
    found = json.loads(wrote(capsys, "a.py", "--vs=b.py", "--json"))
    assert found["ms"] == pytest.approx(90, rel=1e-3) and found["ratio"] == pytest.approx(0.9, 1e-3)
    assert found["vs"]["parts"]["norms"] == pytest.approx(100, rel=1e-3)
    assert "4 A100" in wrote(capsys, "a.py", "--gpus=4", "--gpu=a100")


@pytest.mark.parametrize("versions, words", [
    (dict(torch="2.13.0+cpu"), "triton is not installed"),
    (dict(torch="2.11.0+cpu", triton="3.6.0"), "not torch 2.11.0"),
    (dict(torch="2.13.0+cu130", triton="3.7.1"), "CPU build"),
])
def test_another_compiler_is_refused(monkeypatch, versions, words):
    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with refused(words, UserError):
        predict.main([str(SCRIPT)])


@needs_compiler
def test_what_is_no_script_is_refused(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def train_step():\n    pass\n")
    with refused("has no class GPT", UserError):
        predict.main([str(path)])
    with refused("cannot be read", UserError):
        predict.main([str(tmp_path / "missing.py")])
    for first, words in (("", "trains no step with a compiled model"),
                         ("import no_such_module", "No module named 'no_such_module'; install it")):
        path.write_text(f"{first}\nclass GPT:\n    pass\n")
        done = launch(path, script=ROOT / "records" / "predict.py", check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert words in done.stderr
