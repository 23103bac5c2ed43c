"""`jackfield report`: one page that needs nothing else, for finished, running and killed runs."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from jackfield.errors import DataError
from jackfield_report.command import report
from jackfield_report.svg import thin


@pytest.fixture
def run(tmp_path):
    """A run's folder with 300 steps, made up."""
    folder = tmp_path / "<run> & co"
    folder.mkdir()
    rows = [
        {
            "step": k,
            "reward": k / 300,
            "reward/exact": k / 600,
            "grad_norm": 1.0,
            "time/step": 2.0,
            "time/rollout": 1.5,
            "time/update": 0.25,
        }
        for k in range(1, 301)
    ]
    rows[5]["rollout/overlong"] = 3.0
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows) + '{"step": 301, "rew')
    samples = [{"step": s, "prompt": "<b>p</b>", "response": "$money & </pre><script>alert(1)</script>", "reward": 0.5} for s in (1, 300)]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in samples))
    (folder / "config.json").write_text(json.dumps({"steps": 300, "algorithm": {"name": "grpo"}, "policy": {"model": {"path": "m"}}}))
    return folder


class Page(HTMLParser):
    """Checks that tags close, and collects what matters."""

    VOID = ("meta", "rect", "path", "polyline", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text, self.links = [], [], "", []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def make(folder, *options):
    result = CliRunner().invoke(report, [str(folder), *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return (folder / "report.html").read_text() if not options else None


def test_the_page(run):
    text = make(run)
    page = Page(text)
    assert page.links == []
    assert "script" not in page.seen, "what the model says is text, not markup"
    assert "<script>alert(1)</script>" in page.text
    assert "grpo on m: 300 of 300 steps" in page.text
    assert "reward 0.05167 in the first tenth of the steps, 0.9517 in the last" in page.text
    assert "rollout/overlong: 3" in page.text
    assert "rollout 1.5 s, 75%" in page.text
    assert "other 0.25 s, 12%" in page.text
    assert page.seen.count("figure") == 4, "reward, reward/exact, grad_norm and time/step"
    assert len(text) < 60_000


def test_runs_without_samples_or_config(run):
    (run / "samples.jsonl").unlink()
    (run / "config.json").unlink()
    assert "add tracker samples" in Page(make(run)).text


def test_out(run, tmp_path):
    make(run, "--out", str(tmp_path / "x.html"))
    assert (tmp_path / "x.html").is_file()
    assert not (run / "report.html").exists()
    with pytest.raises(DataError, match="cannot be written"):
        make(run, "--out", str(tmp_path / "none" / "x.html"))


def test_folders_without_a_run(tmp_path, run):
    with pytest.raises(DataError, match=r"no run's folder: it has no metrics\.jsonl"):
        make(tmp_path)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no finished step yet"):
        make(run)


def test_thinning_keeps_the_mean():
    points = [(float(k), float(k % 7)) for k in range(1000)]
    few = thin(points, 10)
    assert len(few) == 10
    assert sum(y for _, y in few) / 10 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:10], 10) == points[:10]


def test_no_torch_is_imported():
    code = "import sys, jackfield_report.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
