"""The record of 2026-04-04 in one file: what can be checked without the record's log, with which
records/2026-04-04_85s/equal.py compares it."""

import dataclasses
from functools import partial
import pytest
import torch
from conftest import ROOT, TINY, launch, log_of, losses, train
from records.tools.load import load_script
from test_interpreted import why_not
from torch.nn.attention import flex_attention as flex_module

RECORD = ROOT / "records" / "2026-04-04_85s" / "train_gpt.py"

def test_golden_losses(tmp_path, shards):
    """Of all stages. test_training.py says how much the machine moves such losses."""
    train(load_script(RECORD), *TINY, "--num_iterations=30", "--val_loss_every=10", *shards,
          f"--records={tmp_path}")
    wanted = [5.7653, 4.3964, 3.3952, 3.2529]
    assert losses(log_of(tmp_path)) == pytest.approx(wanted, abs=0.01)

def test_nothing_recompiles_between_stages(tmp_path, shards, runs_here, monkeypatch):
    record = load_script(RECORD)
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(record.Optimizer, "compiled", lambda self, function: compile(function))
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)  # it refuses CPUs
    hp, _ = record.parse_flags([*TINY, *shards, "--num_iterations=16", "--train_seq_len=384"])
    hp = dataclasses.replace(hp, dtype="bfloat16", use_fp8=True)
    assert {record.pack_len(step, hp) for step in range(16)} == {128, 256, 384}
    world = record.World(0, 1, torch.device("cpu"))
    model = record.GPT(hp, torch.bfloat16, flex=True)
    record.draw_weights(model, hp.seed)
    optimizers = record.build_optimizers(model, hp, world)
    train_shards, val_shards = map(record.find_shards, (hp.train_files, hp.val_files))
    torch._dynamo.reset()
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    record.warm_up(model, optimizers, train_shards, hp, world)
    batches = record.train_batches(train_shards, hp, world, 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(16):
            assert record.train_step(model, next(batches), optimizers, step, hp, world).isfinite()
        record.evaluate(model, record.load_validation(val_shards, hp, world), 16, hp, world)

def full_size(capability=90):
    """The programs of the longest packs and of validation, and FlexAttention's kernels, which
    Triton compiles."""
    from helpers import gpu_program
    from train_gpt import schedule_tensors  # the record's
    hp, used = gpu_program.SPEEDRUN, {}
    def precompile(self, *args, **kwargs):
        for config in self.configs if self.fn.__name__.startswith("triton_tem") else ():
            kernel = self._precompile_config(config).kernel
            used[self.fn.__name__] = getattr(kernel, "metadata", kernel).shared
    def micro_batch(tokens):
        inputs = torch.zeros(tokens, dtype=torch.int32)
        return inputs, inputs.long(), schedule_tensors(1450, hp, torch.device("cpu"))
    gpu_program.prepare(capability)
    gpu_program.CachingAutotuner.precompile = precompile
    gpu_program.micro_batch = micro_batch
    sizes = [gpu_program.most_memory(hp, hp.train_seq_len),
             gpu_program.most_memory(hp, hp.val_seq_len, training=False), gpu_program.kept(1)]
    print("GiB of training, of validation, and kept:", sizes, "shared memory:", used)
    assert max(sizes[:2]) + sizes[2] < 60
    limit = gpu_program.GPUS[capability].shared_memory_per_block_optin
    assert len(used) > 2 and max(used.values()) <= limit

@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_program_for_an_h100(tmp_path):
    print(launch(script=__file__, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT),
                 TRITON_CACHE_DIR=str(tmp_path)).stdout)

if __name__ == "__main__":
    load_script(RECORD, "train_gpt")
    full_size()
