"""The README's code runs exactly as printed."""

from __future__ import annotations

import re

import pytest

from conftest import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(code):
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    return scope


def test_the_ten_lines():
    scope = run(BLOCKS[0])
    assert int(scope["state"].iteration) == 1000
    assert scope["metrics"]["train/critic_loss"].shape == (1000,)


def test_an_env_and_a_loss_of_ones_own():
    scope = run(BLOCKS[1])
    assert float(scope["state"].env.obs.mean()) > 0.5, "the walkers stand at the right end"


def test_a_population():
    scope = run(BLOCKS[2])
    assert scope["state"].iteration.shape == (6,)
    assert int(scope["state"].iteration[5]) == 100
    assert scope["best"].updates.shape == ()


def test_there_is_no_block_that_nobody_runs():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize(
    "path", re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
)
def test_pictures_exist(path):
    assert (ROOT / path).is_file()
