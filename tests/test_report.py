"""The report: whole from any run directory, safe, and it opens in a browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

import jaxtd3
from jaxtd3.output import page, plots, report, video

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SUMMARY = {
    "env": "Pendulum",
    "algo": "fasttd3",
    "seed": 3,
    "status": "time_limit",
    "env_steps": 102_400_000,
    "final_return": -150.25,
    "best_return": -140.5,
    "compile_seconds": 12.5,
    "train_seconds": 3900.0,
    "env_steps_per_second": 26256.4,
    "seconds_to_return": {"-200": 75.0},
    "times": {"compile": 12.5, "train": 3900.0, "eval": 120.0, "checkpoint": 0.0},
    "devices": ["TFRT_CPU_0"],
    "versions": {"jax": "0.10.2"},
}


def rows(count: int = 10):
    for i in range(1, count + 1):
        row = {
            "iteration": i,
            "env_steps": 1000 * i,
            "seconds": 2.0 * i,
            "compile_seconds": 12.5,
            "train/critic_loss": 1.0 / i,
            "episode/return": -1500.0 + 10 * i,
        }
        if i % 2 == 0:
            row |= {"eval/return": -1000.0 + i, "eval/return_std": 5.0, "eval/length": 200.0}
            row |= {"eval/falls": 0.25, "eval/term/angle": 0.5 / i, "eval/return_weighted": None}
        yield row


@pytest.fixture
def run_dir(tmp_path):
    jaxtd3.preset("Pendulum", profile="cpu", critic_lr=3e-4).save(tmp_path / "config.json")
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    (tmp_path / "metrics.jsonl").write_text(lines + '{"iteration": 11, "env_st')
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    frames = (np.full((32, 48, 3), 20 * i, np.uint8) for i in range(10))
    video.write_video(frames, tmp_path / "video.mp4", 10)
    return tmp_path


class Page(HTMLParser):
    """Tags, their attributes, and the text between them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data + "\n"

    def sources(self) -> list[str]:
        named = ("src", "srcset", "href", "data", "poster", "action")
        return [a[n] for _, a in self.tags for n in named if n in a]


def decode(uri: str) -> tuple[str, bytes]:
    kind, data = re.fullmatch(r"data:([a-z/0-9]+);base64,(\S+)", uri).groups()
    return kind, base64.b64decode(data, validate=True)


def test_half_a_line_is_skipped(run_dir):
    assert report.read_metrics(run_dir) == list(rows())
    assert report.read_metrics(run_dir / "nowhere") == []


def test_page_has_all_and_needs_nothing(run_dir):
    assert report.write_report(run_dir) == run_dir / "report.html"
    text = (run_dir / "report.html").read_text()
    html = Page(text)
    found = [decode(uri) for uri in html.sources()]  # every reference is inside the page
    pictures = [data for kind, data in found if kind == "image/png"]
    assert len(pictures) == 8  # curves, behaviour, terms, losses; light and dark
    for data in pictures:
        with Image.open(io.BytesIO(data)) as image:
            assert np.asarray(image.convert("L")).std() > 3
    assert [d for k, d in found if k == "video/mp4"] == [(run_dir / "video.mp4").read_bytes()]
    video = next(a for tag, a in html.tags if tag == "video")
    assert {"controls", "autoplay", "loop", "muted"} <= set(video)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in html.tags}
    for shown in ("Pendulum", "time limit", "-150.2", "-140.5", "102M", "26.3k", "1 h 5 min"):
        assert shown in html.text, shown
    for shown in ("12.5 s", "25", "critic lr", "0.0003", "TFRT_CPU_0", "compiling", "97 %"):
        assert shown in html.text, shown


def test_curves(run_dir):
    path = report.write_curves(run_dir)
    assert path == run_dir / "curves.png"
    with Image.open(path) as image:
        image.load()
        assert image.size[0] == 1500


def test_panels():
    data = list(rows())
    panels = plots.learning_panels(data)
    assert [(p.title, p.xlabel) for p in panels] == [
        ("Return", "environment steps"),
        ("Return", "training time (s)"),
        ("Episode length (steps)", "environment steps"),
        ("Episode length (steps)", "training time (s)"),
    ]
    evaluation, training = panels[0].lines
    np.testing.assert_array_equal(evaluation.x, [2000, 4000, 6000, 8000, 10000])
    np.testing.assert_array_equal(evaluation.y, [-998, -996, -994, -992, -990])
    np.testing.assert_array_equal(evaluation.spread, 5.0)
    assert len(training.x) == 10
    np.testing.assert_array_equal(panels[1].lines[0].x, [4, 8, 12, 16, 20])
    assert [p.title for p in plots.small_panels(data, "eval/term/")] == ["angle"]
    for lost, titles in ((0.0, ["falls"]), (2.0, ["falls", "lost"])):
        told = [row | {"eval/lost": lost} for row in data]
        assert sorted(p.title for p in plots.behaviour_panels(told)) == titles


def test_weighted_return_is_drawn_where_it_differs():
    data = [{**row, "eval/return_weighted": -5.0} for row in rows()]
    labels = [line.label for line in plots.learning_panels(data)[0].lines]
    assert "evaluation, this run's weights" in labels


def test_config_alone_is_enough(tmp_path):
    (tmp_path / "config.json").write_text('{"env": {"name": "X"}, "run": {"seed": 4}}')
    html = Page(report.write_report(tmp_path).read_text())
    assert {"X", "running", "seed"} <= set(html.text.split())
    assert (tmp_path / "curves.png").is_file()


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", ["", "[1]", "nonsense", '{"iteration": 1, "seconds": "x"}'])
def test_broken_files_are_left_out(run_dir, name, content):
    (run_dir / name).write_text(content)
    assert "Pendulum" in report.write_report(run_dir).read_text()


def test_not_a_run(tmp_path):
    with pytest.raises(jaxtd3.UserError, match=r"no config\.json"):
        report.write_report(tmp_path)
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(jaxtd3.UserError, match="not a JSON object"):
        report.write_report(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_everything_is_escaped(tmp_path):
    evil = "<script>alert('1')</script>\"'&"
    config = {
        evil: evil,
        "env": {"name": evil, evil: [evil, {evil: evil}], "weights": {evil: evil}},
    }
    config |= {"run": {"seed": evil}, "algo": evil}
    (tmp_path / "config.json").write_text(json.dumps(config))
    times = {"times": {evil: 1.0}, "seconds_to_return": {evil: 1.0}}
    summary = {"status": evil, "error": evil, "devices": [evil], "versions": {evil: evil}, **times}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    row = {"iteration": 1, "env_steps": 1, "eval/term/" + evil: 1.0, "train/" + evil: 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    text = report.write_report(tmp_path).read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&#34;&#39;&amp;") >= 15
    assert {tag for tag, _ in Page(text).tags} <= {
        *("html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "h3"),
        *("span", "p", "div", "section", "table", "tr", "td", "th", "br", "picture", "source"),
        *("img", "b", "small", "i"),
    }


def test_gif_is_shown_too(run_dir):
    (run_dir / "video.mp4").unlink()
    frames = (np.full((8, 8, 3), 20 * i, np.uint8) for i in range(4))
    video.write_video(frames, run_dir / "video.gif", 10)
    html = Page(report.write_report(run_dir).read_text())
    assert "image/gif" in [decode(uri)[0] for uri in html.sources()]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, "0.5"),
        (-150.25, "-150.2"),
        (9999, "9,999"),
        (12_345, "12.3k"),
        (3.2e10, "32G"),
        (None, ""),
    ],
)
def test_short(value, shown):
    assert page.short(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(8.44, "8.4 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (None, "")]
)
def test_duration(seconds, shown):
    assert page.duration(seconds) == shown


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_opens_in_chromium(run_dir, tmp_path_factory):
    """Its pictures are really painted: the page is tall, and not blank."""
    path, work = report.write_report(run_dir), tmp_path_factory.mktemp("chromium")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    shot = work / "shot.png"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={work / 'profile'}"]
    command += ["--hide-scrollbars", "--virtual-time-budget=3000", "--window-size=1100,1400"]
    subprocess.run(
        [*command, f"--screenshot={shot}", path.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    blue = np.abs(pixels - [0x25, 0x63, 0xC9]).max(axis=-1) < 12  # curves and the bar of times
    assert pixels.shape == (1400, 1100, 3)
    assert blue[700:].sum() > 300, "no curve was painted"
