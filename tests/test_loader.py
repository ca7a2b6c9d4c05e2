"""The loader's stream, the same for any number of ranks, and what validation predicts."""

import dataclasses
import numpy as np
import pytest
import torch
from conftest import refused, write_shard
import train_gpt
from train_gpt import (PRESETS, Shard, World, find_shards, load_validation, step_starts,
                       train_batches)

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
SIZES = [5000, 130, 9000]

@pytest.fixture
def shards(tmp_path):
    """Tokens count up across the shards, from end-of-text on: each says where it comes from."""
    start = -1
    for i, size in enumerate(SIZES):
        write_shard(tmp_path / f"s_{i}.bin", np.arange(start, start + size) % sum(SIZES))
        start += size
    found = find_shards(f"{tmp_path}/s_*.bin")
    (tmp_path / "a[1]").mkdir()
    write_shard(tmp_path / "a[1]" / "s_1.bin", [256, 1])
    assert len(find_shards(f"{tmp_path}/a[1]/s_*.bin")) == 1, "brackets in a folder's name"
    assert [shard.tokens for shard in found] == SIZES
    return found

def hyperparameters(**changes):
    settings = dict(vocab_size=sum(SIZES), train_seq_len=256, micro_batches=6) | changes
    return dataclasses.replace(PRESETS["demo"], **settings)

def batches_of(shards, hp, rank=0, world_size=1, first=0):
    return train_batches(shards, hp, World(rank, world_size, CPU), first)

def stream(shards, world_size, epochs, first=0):
    """Per step the inputs of all ranks, rank after rank, and a check that targets are one ahead."""
    hp = hyperparameters(epochs=epochs)
    ranks = [batches_of(shards, hp, rank, world_size, first=first) for rank in range(world_size)]
    for shares in zip(*ranks, strict=True):
        step = []
        for share in shares:
            assert len(share) == 6 // world_size
            for inputs, targets in share:
                assert inputs.shape == targets.shape == (256,)
                assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
                assert torch.equal(inputs[1:].long(), targets[:-1])
                assert targets[-1] == inputs[-1] + 1
                step.append(inputs)
        yield torch.cat(step)

@pytest.mark.parametrize("damage", [dict(magic=1), dict(version=2), dict(count=-5), dict(count=299),
                                    dict(count=301), dict(tokens=[])], ids=str)
def test_what_is_no_whole_shard_is_refused_by_name(tmp_path, damage):
    write_shard(tmp_path / "s_0.bin", range(300))
    write_shard(tmp_path / "s_1.bin", **dict(tokens=range(300)) | damage)
    with refused(r"s_1\.bin is not a complete shard"):
        find_shards(f"{tmp_path}/s_*.bin")

@pytest.mark.method
def test_ranks_and_a_run_that_goes_on_share_one_stream(shards):
    steps = list(stream(shards, 1, epochs=2))
    assert len(steps) == 20
    # Steps of 1536: three in the first shard, none in the second, five in the third, and one more
    # in each that ends at its end.
    whole = (0, 3), (4, 9)
    for (first, last), start, end in zip(whole, (0, 5130), (4999, 14129), strict=True):
        tokens = torch.arange(start - 1, end - 1, dtype=torch.int32) % sum(SIZES)
        assert torch.equal(torch.cat(steps[first:last]), tokens[:1536 * (last - first)])
        assert torch.equal(steps[last], tokens[-1536:])
    for world_size, first in ((2, 0), (3, 1), (6, 3), (3, 9), (2, 15)):
        rest = stream(shards, world_size, epochs=2, first=first)
        for a, b in zip(steps[first:], rest, strict=True):
            assert torch.equal(a, b), (world_size, first)

@pytest.mark.method
def test_what_is_wrong_with_a_shard_is_said_when_it_is_read(tmp_path):
    tokens = np.full(5000, 60000)  # negative in int16
    tokens[4000] = 65000
    shards = [Shard(write_shard(tmp_path / "bad.bin", tokens), 5000, "")]
    batches = batches_of(shards, hyperparameters(vocab_size=65000))
    inputs, targets = next(batches)[0]
    assert (inputs == 60000).all() and (targets == 60000).all()
    assert next(batches)  # 3,072 tokens before it
    with refused(r"bad\.bin.* 65000.*vocab_size=65000"):
        next(batches)
    batches = batches_of(shards, hyperparameters(vocab_size=65001), first=1)
    assert next(batches) and next(batches)
    hp = hyperparameters(vocab_size=65000, val_tokens=4500, val_seq_len=512)
    with refused(r"bad\.bin.* 65000"):
        load_validation(shards, hp, World(0, 1, CPU))
    write_shard(tmp_path / "bad.bin", range(100))
    with refused(r"bad\.bin.*was truncated"):
        next(batches)

@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("val_tokens", [256 * 10, 256 * 10 + 1, 6000])
def test_validation_predicts_exactly_val_tokens(shards, world_size, val_tokens):
    hp = hyperparameters(val_tokens=val_tokens, val_seq_len=256)
    parts = [load_validation(shards, hp, World(rank, world_size, CPU))
             for rank in range(world_size)]
    sequences = sum(parts, [])
    predicted = torch.cat([targets[targets >= 0] for _, targets in sequences]).sort().values
    assert torch.equal(predicted, torch.arange(val_tokens))
    for inputs, targets in sequences:
        assert inputs.shape == targets.shape == (256,)
        real = targets >= 0
        assert torch.equal((inputs[real].long() + 1) % sum(SIZES), targets[real])
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1

@pytest.mark.method
def test_steps_cover_each_shard_but_for_two_percent_which_the_log_says():
    """The last target is one token further, so 1,024 tokens do not suffice for two steps of 512. A
    last step overlaps the one before where more than 2 % would be unread, as 21 of 1,046 tokens."""
    hp = hyperparameters(train_seq_len=256, micro_batches=2, epochs=3)
    shards = [Shard(name, tokens, "") for name, tokens in
              (("a", 1025), ("b", 512), ("c", 1024), ("d", 1045), ("e", 1046))]
    odd = [("a", 0), ("a", 512), ("c", 0), ("c", 511), ("d", 0), ("d", 512),
           ("e", 0), ("e", 512), ("e", 533)]
    even = [("a", 128), ("a", 512), ("c", 128), ("c", 511), ("d", 128), ("d", 532),
            ("e", 128), ("e", 533)]
    assert [(shard.path, start) for shard, start in step_starts(shards, hp)] == odd + even + odd
    lines = train_gpt.environment(train_gpt.Plan(hp, "", shards, [], None), World(0, 1, CPU))
    assert "unread: 532 of 4652 training tokens per pass" in lines  # b, and 20 of d

def test_validation_reads_no_more_than_it_needs(shards, monkeypatch):
    read = []
    monkeypatch.setattr(train_gpt, "read_tokens", lambda path, start, count, vocab_size: (
        read.append((path[-7:], count)), torch.full((count,), vocab_size - 1))[1])
    load_validation(shards, hyperparameters(val_tokens=5100, val_seq_len=256), World(0, 1, CPU))
    assert read[:2] == [("s_0.bin", 5000), ("s_1.bin", 101)]
    assert not any(count for _, count in read[2:])
