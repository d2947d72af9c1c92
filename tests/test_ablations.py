"""The ablation script: axes fit the settings, words fit the numbers, the figures are here."""

from __future__ import annotations

import csv
import importlib.util
import sys

import numpy as np
import pytest

import jaxtd3
from conftest import ROOT


@pytest.fixture(scope="module")
def ablations():
    spec = importlib.util.spec_from_file_location("ablations", ROOT / "experiments/ablations.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablations"] = module
    spec.loader.exec_module(module)
    return module


def test_every_axis_names_its_variants(ablations):
    for name, axis in ablations.AXES.items():
        base = jaxtd3.preset("Pendulum", axis.algo, "cpu", **ablations.SIZES["tiny"])
        variants = axis.variants(base)
        assert set(axis.best) <= set(variants), name
        configs = [
            jaxtd3.preset("Pendulum", axis.algo, "cpu", **ablations.SIZES["tiny"] | changes)
            for changes in variants.values()
        ]
        assert len({ablations.same_run(cfg) for cfg in configs}) == len(variants), name


@pytest.mark.parametrize(
    ("means", "spread", "verdict"),
    [
        ({"x2": -1, "x1": -50, "x0": -90}, 5, "it agrees."),
        ({"x2": -52, "x1": -50, "x0": -90}, 5, "it agrees, though x1 comes first"),
        ({"x2": -80, "x1": -50, "x0": -90}, 5, "it agrees in part, x1 being better"),
        ({"x2": -80, "x1": -50, "x0": -10}, 5, "it does not agree here, where x0 comes first"),
        ({"x2": -80, "x1": -50, "x0": -10}, 99, "within the spread of the seeds."),
    ],
)
def test_verdicts(ablations, means, spread, verdict):
    axis = ablations.Axis("title", None, "more is better", ("x2", "x1"))
    steps = np.arange(1, 3)

    def curves(mean):
        seeds = mean + spread * np.array([-1.0, 0.0, 1.0])
        return ablations.Curves(steps, steps, np.repeat(seeds[:, None], 2, axis=1))

    told = ablations.sentences(axis, {label: curves(mean) for label, mean in means.items()})
    assert verdict in told
    assert told.startswith("Mean return over the run: ")


def test_the_figures_are_of_these_axes(ablations):
    folder = ROOT / "docs" / "ablations"
    text = (folder / "README.md").read_text()
    for name, axis in ablations.AXES.items():
        base = jaxtd3.preset("Pendulum", axis.algo, "cpu", **ablations.SIZES["tiny"])
        with (folder / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        labels = {ablations.show(label) for label in axis.variants(base)}
        assert {row["variant"] for row in rows} == labels, name
        assert (folder / f"{name}.png").stat().st_size > 10_000
        assert f"({name}.png)" in text
        assert axis.title in text
