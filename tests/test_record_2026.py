"""The record of 2026-04-04 in one file. Its equal.py compares it with the record's source."""

import subprocess

import pytest
import torch
from conftest import ROOT, TINY, launch, log_of, losses, train
from records.tools.load import load_script
from test_interpreted import why_not

RECORD = ROOT / "records" / "2026-04-04_85s" / "train_gpt.py"
WHOLE = dict(dynamic=False, fullgraph=True, backend="aot_eager")

def test_golden_losses(tmp_path, shards):
    """Of all stages. test_training.py says how much the machine moves such losses."""
    train(load_script(RECORD), *TINY, "--num_iterations=30", "--val_loss_every=10", *shards,
          f"--records={tmp_path}")
    assert losses(log_of(tmp_path)) == pytest.approx([5.7653, 4.3964, 3.3952, 3.2529], abs=0.01)

def test_the_proof_names_what_differs_from_todays_script(capsys):
    equal = load_script(RECORD.parent / "equal.py", "equal")
    try:
        equal.compare_definitions()
    except subprocess.CalledProcessError:
        pytest.skip("this copy of the repository has no history")
    assert capsys.readouterr().out in (RECORD.parent / "equal.txt").read_text()

def ready_to_train(record, dtype, *flags):
    hp, _ = record.parse_flags([*TINY, f"--dtype={dtype}", *flags])
    world = record.World(0, 1, torch.device("cpu"))
    model = record.GPT(hp, getattr(torch, dtype), flex=dtype == "bfloat16")
    record.draw_weights(model, hp.seed)
    texts = record.find_shards(hp.train_files)
    return hp, world, model, record.build_optimizers(model, hp, world), texts

def test_each_rule_updates_at_its_own_steps(shards, runs_here, monkeypatch):
    record = load_script(RECORD)
    rules = [(*rule, options | dict(every=4) if "tables" in rule[0] else options)
             for *rule, options in record.PARAMETERS]
    monkeypatch.setattr(record, "PARAMETERS", rules)
    hp, world, model, optimizers, texts = ready_to_train(record, "float32", *shards)
    updates = {"value_tables.0.weight": [], "embed.weight": [], "layers.0.attn.proj": []}
    for step, batches in zip(range(8), record.train_batches(texts, hp, world, 0)):
        before = {name: model.get_parameter(name).detach().clone() for name in updates}
        record.train_step(model, batches, optimizers, step, hp, world)
        for name, weight in before.items():
            if not torch.equal(weight, model.get_parameter(name)):
                updates[name].append(step)
    assert [*updates.values()] == [[3, 7], [1, 3, 5, 7], [*range(8)]]

def test_nothing_recompiles_between_stages(shards, runs_here, monkeypatch):
    record = load_script(RECORD)
    monkeypatch.setattr(record.Optimizer, "compiled", lambda self, f: torch.compile(f, **WHOLE))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)
    hp, world, model, optimizers, texts = ready_to_train(
        record, "bfloat16", *shards, "--num_iterations=16", "--train_seq_len=384")
    torch._dynamo.reset()
    model.compile(**WHOLE)
    record.warm_up(model, optimizers, texts, hp, world)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step, batches in zip(range(16), record.train_batches(texts, hp, world, 0)):
            assert record.train_step(model, batches, optimizers, step, hp, world).isfinite()
        val_texts = record.find_shards(hp.val_files)
        record.evaluate(model, record.load_validation(val_texts, hp, world), 16, hp, world)

def full_size():
    """Of the longest pack and of validation. Triton compiles FlexAttention's kernels."""
    from helpers import gpu_program
    from train_gpt import schedule_tensors  # the record's
    hp, used = gpu_program.SPEEDRUN, []
    def precompile(self, *args, **kwargs):
        for config in self.configs if self.fn.__name__.startswith("triton_tem") else ():
            kernel = self._precompile_config(config).kernel
            used.append(getattr(kernel, "metadata", kernel).shared)
    gpu_program.prepare(90)
    gpu_program.CachingAutotuner.precompile = precompile
    gpu_program.micro_batch = lambda T: (torch.zeros(T, dtype=torch.int32), torch.zeros(T).long(),
                                         schedule_tensors(1450, hp, torch.device("cpu")))
    peaks = (gpu_program.most_memory(hp, hp.train_seq_len),
             gpu_program.most_memory(hp, hp.val_seq_len, training=False))
    print("GiB of training, validation:", peaks, "kept:", gpu_program.kept(1), "shared:", used)
    assert max(peaks) + gpu_program.kept(1) < 60
    assert used and max(used) <= gpu_program.GPUS[90].shared_memory_per_block_optin

@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_programs_for_an_h100(tmp_path):
    print(launch(script=__file__, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT),
                 TRITON_CACHE_DIR=str(tmp_path)).stdout)

if __name__ == "__main__":
    load_script(RECORD, "train_gpt")
    full_size()
