"""Every command of docs/your_robot.md runs, in order, with short sizes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from conftest import ROOT
from jaxtd3.cli.main import main

TEXT = (ROOT / "docs" / "your_robot.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.strip().splitlines()]
QUADRUPED = Path(__file__).parent / "data" / "quadruped" / "quadruped.xml"
SHORT = (
    "--num-envs 8 --length 32 --batch-size 32 --critic-updates 1 --policy-updates 1 --warmup 8 "
    "--critic-hidden 16 --actor-hidden 16 --iterations 20 --log-every 10 --eval-every 0 "
    "--eval-episodes 2 --checkpoint-every 0 --no-video --quiet"
)


def test_ten_steps():
    assert re.findall(r"^\*\*(\d+)\.", TEXT, re.MULTILINE) == [str(i) for i in range(1, 11)]
    assert len(COMMANDS) == 9  # the second step is to read


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(QUADRUPED, tmp_path)
    (tmp_path / "runs").mkdir()
    for command in COMMANDS:
        text = command.replace("$SHORT", SHORT).replace("$RESUME", "--no-video --quiet")
        words = shlex.split(text)
        assert words[0] == "jaxtd3"
        assert main(words[1:]) == 0, command
    assert json.loads((tmp_path / "runs/stand/summary.json").read_text())["iterations"] == 40
    sweep = json.loads((tmp_path / "runs/sweep/results.json").read_text())
    assert len(sweep["members"]) == 3
    assert sweep["traces"] == 1  # one program for all of them
    assert "action_rate" in (tmp_path / "runs/sweep/report.html").read_text()
    assert (tmp_path / "policy.onnx").stat().st_size > 1000


def test_the_table_lines_are_the_templates():
    """What the page shows of env.py stands in the template."""
    template = (ROOT / "src/jaxtd3/new/templates/stand.py.txt").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for line in block.strip().splitlines():
        code = line.split("#")[0].strip()
        assert code.replace('s.sensor("gyro")', "$gyro") in template
