"""Datasets: rows and columns, and one-line errors for everything that can be wrong with a file."""

from __future__ import annotations

import json

import pytest

from jackfield import registry
from jackfield.config import ComponentSpec
from jackfield.errors import ConfigError, DataError


def make(name, **options):
    return registry.build("dataset", ComponentSpec(name=name, options=options))


def write(path, rows):
    path.write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    return str(path)


ROWS = [{"question": f"q{i}", "solution": str(i), "extra": i} for i in range(5)]


def as_jsonl(folder, rows):
    return make("jsonl", path=write(folder / "rows.jsonl", rows))


def as_parquet(folder, rows):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return make("parquet", path=str(folder / "rows.parquet"))


def as_saved(folder, rows):
    pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(folder / "saved")
    return make("hf", path=str(folder / "saved"))


def as_folder(folder, rows):
    pytest.importorskip("datasets")
    (folder / "plain").mkdir()
    write(folder / "plain" / "train.jsonl", rows)
    return make("hf", path=str(folder / "plain"))


@pytest.fixture(params=[as_jsonl, as_parquet, as_saved, as_folder])
def stored(request, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return lambda rows: request.param(tmp_path, rows)


def test_rows_by_index(stored):
    data = stored(ROWS)
    assert len(data) == 5
    assert [data[i]["prompt"] for i in (4, 0)] == ["q4", "q0"]
    assert data[3] == {"question": "q3", "solution": "3", "extra": 3, "prompt": "q3", "answer": "3"}


def test_chat_rows(stored):
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert stored([{"messages": chat}])[0]["prompt"] == chat[:1]


def test_columns_and_limit(tmp_path):
    path = write(tmp_path / "x.jsonl", ROWS)
    data = make("jsonl", path=path, columns={"prompt": "solution", "answer": "extra"}, limit=2)
    assert len(data) == 2
    assert (data[1]["prompt"], data[1]["answer"]) == ("1", 1)
    with pytest.raises(DataError, match=r"no column 'nothing'.*it has: question, solution, extra"):
        make("jsonl", path=path, columns={"prompt": "nothing"})


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"prompt": "p"}, "p", None),
        ({"prompt": [{"role": "user", "content": "u"}], "completion": [{"role": "assistant", "content": "c"}]}, None, "c"),
        ({"prompt": [{"role": "user", "content": "u"}], "solution": "s"}, None, "s"),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, [{"role": "user", "content": "u"}], "a"),
        ({"messages": [{"role": "user", "content": "u"}]}, [{"role": "user", "content": "u"}], None),
        ({"problem": "p", "answer": 3, "solution": "long"}, "p", 3),
    ],
)
def test_the_usual_columns_of_trl_are_understood(tmp_path, row, prompt, answer):
    found = make("jsonl", path=write(tmp_path / "x.jsonl", [row]))[0]
    assert found["prompt"] == (prompt or row["prompt"])
    assert found.get("answer") == answer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', r"rows\.jsonl:2: not JSON .* correct or remove the line"),
        ('{"prompt": "a"}\n\n[1]\n', r"rows\.jsonl:3: a list, not an object"),
        ('{"text": "a"}\n', r"has no prompt; map one with dataset\.columns"),
        ('{"prompt": "\udcff"}\n', r"rows\.jsonl:1: not JSON"),
    ],
)
def test_bad_jsonl_is_one_line(tmp_path, text, words):
    (tmp_path / "rows.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=words) as caught:
        make("jsonl", path=str(tmp_path / "rows.jsonl"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_missing_and_corrupt_files(tmp_path, kind):
    with pytest.raises(DataError, match=r"dataset\.path: there is no .*nothing") as caught:
        make(kind, path=str(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)
    if kind != "jsonl":
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "torn.parquet").write_bytes(b"PAR1 and no more")
        with pytest.raises(DataError) as caught:
            make(kind, path=str(tmp_path / "empty"))
        assert "\n" not in str(caught.value)


def test_split_that_does_not_exist(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert len(make("hf", path=str(tmp_path / "saved"))) == 5
    with pytest.raises(DataError, match="has no split 'test'; it has: train"):
        make("hf", path=str(tmp_path / "saved"), split="test")


def test_arithmetic_splits_are_disjoint_and_whole():
    train, held, all_of_them = (make("arithmetic", split=s) for s in ("train", "held_out", "all"))
    prompts = [{d[i]["prompt"] for i in range(len(d))} for d in (train, held, all_of_them)]
    assert [len(p) for p in prompts] == [65, 16, 81]
    assert not prompts[0] & prompts[1]
    assert prompts[0] | prompts[1] == prompts[2]
    for i in range(81):
        row = all_of_them[i]
        a, b = row["prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(a) + int(b) == int(row["answer"])
    assert make("arithmetic", question="{a}+{b}=", split="all")[0] == {"prompt": "1+1=", "answer": "2"}


def test_copy():
    data = make("copy", size=300)
    rows = [data[i] for i in range(300)]
    assert all(r["answer"] == r["prompt"].split()[0] and len(r["prompt"].split()) == 4 for r in rows)
    again, other = make("copy", size=300), make("copy", size=300, seed=1)
    assert rows == [again[i] for i in range(300)]
    assert len({r["prompt"] for r in rows}) > 280
    assert {r["answer"] for r in rows} == {f"t{i}" for i in range(10)}
    assert rows != [other[i] for i in range(300)]


@pytest.mark.slow
def test_reasoning_gym():
    data = make("reasoning_gym", task="chain_sum", options={"min_terms": 2, "max_terms": 2}, size=5, seed=1)
    assert len(data) == 5
    assert "metadata" in data[0]
    assert data[0] == make("reasoning_gym", task="chain_sum", options={"min_terms": 2, "max_terms": 2}, size=5, seed=1)[0]
    with pytest.raises(DataError, match=r"no 'chain_sun'; did you mean chain_sum"):
        make("reasoning_gym", task="chain_sun")
    with pytest.raises(DataError, match=r"dataset\.options do not fit"):
        make("reasoning_gym", task="chain_sum", options={"terms": 2})


def test_mistyped_option():
    with pytest.raises(ConfigError, match=r"dataset 'copy': unknown field 'word'; did you mean 'words'"):
        make("copy", word=3)
