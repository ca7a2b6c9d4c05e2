"""The record of 2026-04-04 in one file: what can be checked of it without the record's log. Its
folder's equal.py compares it with that, and records/README.md says where to get it."""

import dataclasses
import sys
from functools import partial
import pytest
import torch
from conftest import ROOT, TINY, launch, log_of, losses, train
from records.tools.load import load_script
from test_interpreted import why_not

RECORD = ROOT / "records" / "2026-04-04_85s" / "train_gpt.py"
GOLDEN = [5.7653, 4.3964, 3.3952, 3.2529]  # at the first step, and after 10, 20 and 30

def test_golden_losses(tmp_path, shards):
    """All parts, stages and targets, and the untying. test_training.py says how much the machine
    moves such losses."""
    train(load_script(RECORD), *TINY, "--num_iterations=30", "--val_loss_every=10", *shards,
          f"--records={tmp_path}")
    assert losses(log_of(tmp_path)) == pytest.approx(GOLDEN, abs=0.01)

def test_nothing_recompiles_between_stages(tmp_path, shards, runs_here, monkeypatch):
    record, compiled, cpu = load_script(RECORD), [], torch.device("cpu")
    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend)
    monkeypatch.setattr(record.Optimizer, "compiled", lambda self, function: compile(function))
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *args: None)
    hp, _ = record.parse_flags([*TINY, *shards, "--num_iterations=16",
                                 "--train_seq_len=384", "--micro_batches=1"])
    hp = dataclasses.replace(hp, dtype="bfloat16", use_fp8=True)
    world = record.World(0, 1, cpu)
    model = record.GPT(hp, torch.bfloat16, flex=True)
    record.draw_weights(model, hp.seed)
    optimizers = record.build_optimizers(model, hp, world)
    train_shards, val_shards = map(record.find_shards, (hp.train_files, hp.val_files))
    torch._dynamo.reset()
    model.compile(dynamic=False, fullgraph=True, backend=backend)
    record.warm_up(model, optimizers, train_shards, hp, world)
    warm = len(compiled)
    batches = record.train_batches(train_shards, hp, world, 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(hp.num_iterations):
            assert record.train_step(model, next(batches), optimizers, step, hp, world).isfinite()
        record.evaluate(model, record.load_validation(val_shards, hp, world), 16, hp, world)
    lengths = {record.pack_len(step, hp) for step in record.stage_starts(hp)}
    assert len(lengths) == 3 and len(compiled) == warm

def case_full_size():
    """Both programs of the longest pack, and validation. FlexAttention's kernels are compiled by
    Triton as well, to the last."""
    from helpers import gpu_program
    from helpers.fake_gpu import GPUS, pretend
    from train_gpt import GPT, schedule_tensors  # the record's, as main has loaded it
    speedrun, used = gpu_program.SPEEDRUN, {}
    def precompile(self, *args, **kwargs):
        for config in self.configs if self.fn.__name__.startswith("triton_tem") else ():
            kernel = self._precompile_config(config).kernel
            used[self.fn.__name__] = getattr(kernel, "metadata", kernel).shared
    def micro_batch(tokens):
        inputs = torch.zeros(tokens, dtype=torch.int32)
        return inputs, inputs.long(), schedule_tensors(1450, speedrun, torch.device("cpu"))
    gpu_program.prepare(90)
    gpu_program.CachingAutotuner.precompile = precompile
    gpu_program.micro_batch = micro_batch
    training = gpu_program.most_memory(speedrun, speedrun.train_seq_len)
    validation = gpu_program.most_memory(speedrun, speedrun.val_seq_len, training=False)
    kept = gpu_program.kept(1)
    print(f"training: {training:.2f} GiB; validation: {validation:.2f} GiB; kept: {kept:.2f} GiB")
    assert max(training, validation) + kept < 60
    assert len(used) > 2 and max(used.values()) <= GPUS[90].shared_memory_per_block_optin, used

@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_program_for_an_h100(tmp_path):
    print(launch(script=__file__, PYTHONPATH=str(ROOT), TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
                 TRITON_CACHE_DIR=str(tmp_path)).stdout)

if __name__ == "__main__":
    load_script(RECORD, "train_gpt")
    case_full_size()
