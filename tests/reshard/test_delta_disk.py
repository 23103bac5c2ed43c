"""Transports `delta` and `disk`: exact whatever happened to the engine in between, and honest about bytes."""

import json

import pytest
import reshard_fakes as fakes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.components import WorkerContext
from jackfield.errors import DataError
from jackfield_reshard.delta import DENSE, MASK, PAIRS, Delta, decode, encode
from jackfield_reshard.disk import Disk, load_version, versions
from jackfield_reshard.families import tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import drawn, materialise

MODEL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 100), st.integers(0, 100), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 5))
def test_changes_are_lossless_and_never_longer(length, changes, dtype, seed):
    """Zeros of both signs and NaNs included: bits count, not values."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(length, generator=generator).to(dtype)
    now = before.clone()
    where = torch.randint(0, length, (changes,), generator=generator)
    now[where] = torch.tensor([0.0, -0.0, float("nan"), 1.0])[torch.randint(0, 4, (changes,), generator=generator)].to(dtype)
    form, count, payload = encode(now, before)
    assert payload.numel() <= length * dtype.itemsize
    got = before.clone()
    decode(form, count, payload, got)
    assert torch.equal(got.view(torch.uint8), now.view(torch.uint8))


def test_each_form_is_used_where_it_is_shortest():
    before = torch.zeros(6400)
    for changes, form in ((0, PAIRS), (1, PAIRS), (3000, MASK), (6400, DENSE)):
        now = before.clone()
        now[:changes] = 1
        assert encode(now, before)[0] == form
    assert encode(before, None)[0] == DENSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_delta_between_separate_groups(ranks, dtype):
    """2 + 2 processes, masters in fp32: dense first, then next to nothing, then an engine that lost its weights is repaired."""
    table = tensors(MODEL)
    train, serve = Layout("megatron", pp=2), Layout("vllm", tp=2)

    def body(rank, world):
        trains = rank < 2
        own = rank if trains else rank - 2
        side = materialise(table, train if trains else serve, own, drawn(0) if trains else None, "float32" if trains else dtype)
        backend, engine = (fakes.FakeBackend(side), None) if trains else (None, fakes.FakeEngine(side))
        link = Delta(Delta.Config(bucket_bytes=1 << 14))
        link.connect(backend, engine, WorkerContext("policy", CPU, 0, rank, world))
        reports = []
        for version in range(4):
            for s in side:
                if trains and version == 1 and s.name.endswith("norm.weight"):
                    s.tensor[0] += 1
                if not trains and version == 2 and "layers.1" in s.name:
                    s.tensor.zero_()
            reports.append(link.sync(version))
        return [(s.name, s.shape, s.offset, s.size, s.tensor.clone()) for s in side], reports

    results = ranks(4, body)
    full = {}
    for shards, _ in results[:2]:
        for name, shape, offset, size, tensor in shards:
            whole = full.setdefault(name, torch.full(shape, float("nan")))
            whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] = tensor
    for shards, _ in results[2:]:
        for name, shape, offset, size, tensor in shards:
            want = full[name].view(shape)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].to(tensor.dtype)
            assert torch.equal(tensor, want), name
    sent = [sum(reports[v].bytes_sent for _, reports in results) for v in range(4)]
    saved = [sum(reports[v].bytes_saved for _, reports in results) for v in range(4)]
    dense = sum(tensor.numel() * tensor.element_size() for shards, _ in results[2:] for *_, tensor in shards)
    assert saved[0] == 0 and saved[1] > 0.95 * dense, "after a change of a few elements nearly everything is saved"
    assert sent[1] < 0.2 * sent[0] and sent[3] < 0.2 * sent[0]
    assert 0.2 * sent[0] < sent[2] < 0.8 * sent[0], "the lost layer, and only that, is sent again"


def test_disk_between_layouts(ranks, tmp_path):
    table = tensors(MODEL)
    train, serve = Layout("megatron", tp=2, dp=2), Layout("vllm", tp=4)

    def body(rank, world):
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0)))
        engine = fakes.FakeEngine(materialise(table, serve, rank, None))
        link = Disk(Disk.Config(folder=tmp_path / "weights", verify=True))
        link.connect(backend, engine, WorkerContext("policy", CPU, 0, rank, world))
        for version in range(3):
            for s, new in zip(backend.held, materialise(table, train, rank, drawn(version)), strict=True):
                s.tensor.copy_(new.tensor)
            report = link.sync(version)
        for got, want in zip(engine.shards(), materialise(table, serve, rank, drawn(2)), strict=True):
            assert torch.equal(got.tensor, want.tensor), got.name
        assert engine.version == 2
        return report.bytes_sent

    written = ranks(4, body)
    model = 4 * sum(torch.Size(t.shape).numel() * len(t.layers) for t in table)
    assert sum(written) == model, "every element is written once, though two replicas hold it"
    assert max(written) < 1.3 * model / 4, "and the replicas share the work"
    folder = tmp_path / "weights"
    assert versions(folder) == [1, 2], "the newest two are kept"

    late = fakes.FakeEngine(materialise(table, Layout("vllm"), 0, None))
    report = load_version(folder, late, verify=True)
    assert report.version == 2 and report.bytes_copied == model
    for got, want in zip(late.shards(), materialise(table, Layout("vllm"), 0, drawn(2)), strict=True):
        assert torch.equal(got.tensor, want.tensor), got.name


def test_a_version_is_whole_or_absent(tmp_path):
    """What a killed writer leaves is no version; a flipped bit is noticed; a missing weight is named."""
    table = tensors(MODEL)
    backend = fakes.FakeBackend(materialise(table, Layout("torch"), 0, drawn(0)))
    link = Disk(Disk.Config(folder=tmp_path))
    link.connect(backend, None, WorkerContext("policy", CPU, 0))
    link.sync(7)
    (tmp_path / ".v00000008.partial").mkdir()
    (tmp_path / "v00000009").mkdir()
    assert versions(tmp_path) == [7]
    engine = fakes.FakeEngine(materialise(table, Layout("vllm"), 0, None))
    with pytest.raises(DataError, match=r"v00000009/index.json: cannot be read .* versions there: \[7\]"):
        load_version(tmp_path, engine, 9)
    file = tmp_path / "v00000007" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="is corrupt"):
        load_version(tmp_path, engine, verify=True)
    index = tmp_path / "v00000007" / "index.json"
    content = json.loads(index.read_text())
    content["boxes"] = [b for b in content["boxes"] if b["name"] != "model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"model.norm.weight: version 7 .* does not hold offset \[0\]"):
        load_version(tmp_path, engine)
