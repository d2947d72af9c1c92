"""Sweeps: one trace, fair ranks, results that survive a kill, every mistake one line."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jaxtd3
from jaxtd3.cli import main as cli
from jaxtd3.cli.sweep import decide, with_curves
from jaxtd3.config.config import load_config
from jaxtd3.envs import metrics
from jaxtd3.envs.cruise import Cruise
from jaxtd3.envs.registry import reward_kind
from jaxtd3.run.checkpoint import restore_agent, restore_from
from jaxtd3.run.chunks import Chunks
from jaxtd3.run.timing import Clock
from jaxtd3.sweep import plan as sweep_plan
from jaxtd3.sweep import results as sweep_results
from jaxtd3.sweep import source as sweep_source
from jaxtd3.sweep.waves import Waves
from test_cli import fails
from test_report import CHROMIUM, Page, decode

SETTINGS = {
    "num_envs": 4,
    "batch_size": 16,
    "critic_hidden": 8,
    "actor_hidden": 8,
    "num_atoms": 11,
    "critic_updates": 1,
    "policy_updates": 1,
    "length": 32,
    "warmup": 2,
    "iterations": 8,
    "log_every": 4,
    "eval_every": 4,
    "eval_episodes": 4,
    "episode_length": 20,
}
TINY = ["--env", "Cruise", "--profile", "cpu", "--quiet"]
TINY += [f"--{name}={value}" for name, value in SETTINGS.items()]
GRID = ["--grid", "energy=0,-1", "agent.gamma=0.8,0.9,0.95", "--members-at-once", "2"]


def sweep(run_dir: Path, *more: str) -> dict:
    assert cli.main(["sweep", "--run-dir", str(run_dir), *more]) == 0
    return json.loads((run_dir / "results.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """Six members in waves of two."""
    run_dir = tmp_path_factory.mktemp("swept") / "sweep"
    sweep(run_dir, *TINY, *GRID)
    return run_dir


def results_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "results.json").read_text())


def outcome(results: dict) -> list:
    """What must not depend on how often a sweep was interrupted."""
    return [(m["index"], m["rank"], m["values"], m["metrics"]) for m in results["members"]]


# --- a whole sweep ------------------------------------------------------------------------------


def test_results(swept):
    results = results_of(swept)
    members = results["members"]
    assert results["traces"] == 1  # three waves, one program
    assert [m["rank"] for m in members] == list(range(1, 7))
    assert sorted(m["index"] for m in members) == list(range(6))
    values = {(m["values"]["energy"], m["values"]["agent.gamma"]) for m in members}
    assert values == {(e, g) for e in (0, -1) for g in (0.8, 0.9, 0.95)}
    errors = [m["metrics"]["tracking_error"] for m in members]
    assert errors == sorted(errors)
    assert len(set(errors)) == 6  # every member is a run of its own
    for m in members:
        assert m["weights"] == {"tracking": 1.0, "energy": m["values"]["energy"], "alive": 0.0}
        assert m["metrics"]["length"] == 100  # evaluations run the environment's own episode
    table = list(csv.DictReader((swept / "results.csv").read_text().splitlines()))
    assert [int(row["member"]) for row in table] == [m["index"] for m in members]
    assert float(table[0]["tracking_error"]) == pytest.approx(errors[0])


def test_best_is_ready_for_training(swept, capsys, tmp_path):
    best = results_of(swept)["best"]
    config = load_config(swept / "best.json")
    assert config.env.weights == {"energy": best["values"]["energy"]}
    assert config.agent.gamma == best["values"]["agent.gamma"]
    assert best["flags"] == f"--gamma {config.agent.gamma!r} --reward energy=" + repr(
        config.env.weights["energy"]
    )


def test_a_member_is_a_run(swept, tmp_path, capsys, bare_ends):
    """`evaluate` takes its folder; `train` with its flags gives the same policy within 1e-5."""
    member = next(m for m in results_of(swept)["members"] if m["index"] == 4)
    folder = swept / member["path"]
    assert cli.main(["evaluate", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["return"] == pytest.approx(member["metrics"]["default_reward"], rel=1e-4)
    assert found["return_weighted"] == pytest.approx(member["metrics"]["own_reward"], rel=1e-4)
    alone = tmp_path / "alone"
    flags = ["--reward", "energy=-1", "--gamma", "0.9", "--no-video", "--run-dir", str(alone)]
    assert cli.main(["train", *TINY, *flags]) == 0
    config = load_config(folder / "config.json")
    assert config == load_config(alone / "config.json")
    env = jaxtd3.make_env(config.env)
    agent = jaxtd3.fast_td3(env.spec, config.agent)
    template = jax.eval_shape(agent.init, jax.random.key(0))
    a, b = restore_agent(folder, template), restore_agent(alone, template)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a.actor, b.actor
    )


def test_report(swept):
    """Every reference is inside the page; every member and every picture is there."""
    text = (swept / "report.html").read_text()
    page = Page(text)
    kinds = [decode(uri)[0] for uri in page.sources()]
    assert kinds.count("image/png") == 6  # curves, parallel coordinates, front; light and dark
    assert sum(kind in ("video/mp4", "image/gif") for kind in kinds) == 3
    assert not re.search(r"https?://|@import|url\(|<script", text)
    best = results_of(swept)["best"]
    for shown in ("Cruise", "completed", "Pareto front", best["flags"], "tracking error"):
        assert shown in page.text, shown


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_report_opens_in_chromium(swept, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    shot = tmp_path / "shot.png"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--hide-scrollbars", "--virtual-time-budget=3000", "--window-size=1100,2400"]
    page = (swept / "report.html").as_uri()
    subprocess.run([*command, f"--screenshot={shot}", page], check=True, capture_output=True)
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    colourful = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 60
    assert colourful[1000:1900].sum() > 500, "no curve was painted"


# --- kill and resume ----------------------------------------------------------------------------


def test_killed_and_resumed(swept, tmp_path, monkeypatch):
    """What was finished is not trained again, and nobody can tell from the results."""
    run_dir, trained = tmp_path / "sweep", []
    train = Waves.train

    def dying(self, number, members, stop):
        if number == 1 and len(trained) < 2:
            trained.append(number)
            raise MemoryError("killed")
        trained.append(number)
        return train(self, number, members, stop)

    monkeypatch.setattr(Waves, "train", dying)
    with pytest.raises(MemoryError):
        sweep(run_dir, *TINY, *GRID)
    assert not (run_dir / "results.json").exists()
    (run_dir / "waves" / ".tmp-001" / "002").mkdir(parents=True)  # half a wave
    results = sweep(run_dir, "--resume", "--quiet", "--no-video")
    assert trained == [0, 1, 1, 2]
    assert outcome(results) == outcome(results_of(swept))
    again = sweep(run_dir, "--resume", "--quiet", "--no-video", "--metric", "action_rate")
    assert trained == [0, 1, 1, 2]  # ranking by another metric trains nothing
    rates = [m["metrics"]["action_rate"] for m in again["members"]]
    assert rates == sorted(rates)


def test_resume_keeps_its_settings(swept, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["sweep", "--run-dir", str(swept)]
    assert "is not empty" in fails([*base, *TINY, *GRID], capsys)
    said = fails([*base, "--resume", "--grid", "energy=0,-9"], capsys)
    assert "a resumed sweep keeps its settings: leave --grid out" in said
    assert "unknown metric 'tracking'" in fails([*base, "--resume", "--metric", "tracking"], capsys)


OWN = """
import jax
import jax.numpy as jnp
from jaxtd3 import EnvSpec, EnvStep


class Own:
    spec = EnvSpec("Own", obs_size=1, action_size=1, episode_length=20)

    def reset(self, key):
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, x, action):
        return EnvStep(x, x, x[0], jnp.zeros(0), x[0] > 1)
"""


def test_resume_tells_of_changed_code(tmp_path):
    """With or without the same flags; other settings are refused as ever."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    given = {"env": f"{path}:Own", "grid": [["agent.gamma=0.8,0.9"]]}
    again = cli.Sweep(**given)
    config, space, notes = decide(again, given, None)
    assert not any("changed since" in note for note in notes)
    saved = sweep_plan.Plan(config, space, 2)
    path.write_text(f"{OWN}# another day\n")
    for asked in ({}, given):
        now, _, notes = decide(cli.Sweep(**asked), asked, saved)
        (said,) = [note for note in notes if "changed since" in note]
        assert f"the code of {path}:Own: sha256 {config.env.source_sha256[:12]} -> " in said
        assert now == config.override({"source_sha256": now.env.source_sha256})
        assert now != config
    other = {"grid": [["agent.gamma=0.8,0.95"]]}
    with pytest.raises(jaxtd3.UserError, match="leave --grid out"):
        decide(cli.Sweep(**other), other, saved)


# --- every mistake is one line ------------------------------------------------------------------

BAD = [
    ("", "nothing to sweep"),
    ("--grid", "--grid"),
    ("--grid energy", "write NAME=VALUE,VALUE"),
    ("--grid energy=", "write NAME=VALUE,VALUE"),
    ("--grid energy=0,x", "'x' is not a number"),
    ("--grid energy=0,nan", "nan is not finite"),
    ("--grid energy=0,0", "the same value twice"),
    ("--grid energy=0,1 energy=2", "names energy twice"),
    ("--grid enrgy=0,1", "did you mean 'energy'?"),
    ("--grid agent.gama=0.9", "did you mean 'agent.gamma'?"),
    ("--grid agent.gamma=0.9,1.5", "gamma=1.5 is out of range"),
    ("--grid critic_hidden=32,64", "agent.critic_hidden is static"),
    ("--grid num_envs=2,4", "env.num_envs is static"),
    ("--grid seed=0,1", "--seeds N"),
    ("--random 3", "has no range"),
    ("--random energy=log:-1:-2", "write N NAME"),
    ("--random 0 energy=log:-1:-2", "write N NAME"),
    ("--random 3 energy=lgo:-1:-2", "did you mean 'log'?"),
    ("--random 3 energy=log:-1:1", "not of one sign"),
    ("--random 3 energy=log:-1:-1", "bounds are equal"),
    ("--random 3 energy=log:-1", "write NAME=log:LOW:HIGH"),
    ("--grid energy=0,-1 --random 3 energy=log:-1:-2", "in --grid and in --random"),
    ("--grid energy=0,-1 --seeds 0", "--seeds 0 is below 1"),
    ("--grid energy=0,-1 --members-at-once 0", "below 1"),
    ("--grid energy=0,-1 --metric tracking_eror", "did you mean 'tracking_error'?"),
    ("--grid energy=0,-1 --metric nowhere:wobble", "No module named 'nowhere'"),
    ("--grid energy=0,-1 --metric math:pi", "is not a function"),
    ("--grid energy=0,-1 --pareto survival", "takes two metrics"),
    ("--grid energy=0,-1 --pareto survival x", "unknown metric 'x'"),
    ("--grid energy=0,-1 --optuna -1", "negative"),
    ("--grid energy=0,-1 --resume", "--resume needs --run-dir"),
    ("--points missing.json", "cannot read missing.json"),
    ("--grdi energy=0,-1", "did you mean '--grid'?"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=[given for given, _ in BAD])
def test_bad_sweeps(given, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in fails(["sweep", *TINY, *given.split()], capsys)


def test_reward_that_is_no_sum(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fails(["sweep", "--env", "CartpoleBalance", "--grid", "upright=1,2"], capsys)
    assert "not a weighted sum" in said


def test_without_optuna(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_source, "find_spec", lambda name: None)
    said = fails(["sweep", *TINY, "--grid", "energy=0,-1", "--optuna", "4"], capsys)
    assert 'pip install "jaxtd3[sweep]"' in said


# --- plans --------------------------------------------------------------------------------------


def test_combinations():
    grid, random = [["energy=0,-1", "gamma=0.9"]], [["2", "alive=log:-1e-3:-1e-6"]]
    space = sweep_plan.read_space(grid, random, seeds=2, trials=0)
    found = sweep_plan.combinations(space, seed=1)
    assert [c["energy"] for c in found] == [0, 0, -1, -1]
    draws = {c["alive"] for c in found}
    assert len(draws) == 2
    assert all(-1e-3 <= x <= -1e-6 for x in draws)
    assert found == sweep_plan.combinations(space, seed=1) != sweep_plan.combinations(space, seed=2)
    members = sweep_plan.members_of(found, space.seeds, seed=5)
    assert [m.index for m in members] == list(range(8))
    assert [m.group for m in members] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [m.seed for m in members] == [5, 6] * 4


def test_points(tmp_path):
    path = tmp_path / "points.json"
    path.write_text('[{"name": "own"}, {"name": "dear", "energy": -1, "agent.gamma": 0.9}]')
    space = sweep_plan.read_space([], [], seeds=1, trials=0, points=path)
    assert space.names == ("energy", "agent.gamma")
    members = sweep_plan.members_of(sweep_plan.combinations(space, 0), 1, 0)
    assert [(m.name, m.values) for m in members] == [
        ("own", {}),
        ("dear", {"energy": -1, "agent.gamma": 0.9}),
    ]
    with pytest.raises(jaxtd3.UserError, match="stands alone"):
        sweep_plan.read_space([["energy=1"]], [], seeds=1, trials=0, points=path)
    for text, says in (("{}", "not a list"), ('[{"energy": "x"}]', "not a number"), ("x", "JSON")):
        path.write_text(text)
        with pytest.raises(jaxtd3.UserError, match=says):
            sweep_plan.read_points(path)


def test_log_draws_are_even_on_a_log_scale():
    r = sweep_plan.read_range("x", "log:-1e-6:-1e-2")
    assert [r.sample(u) for u in (0, 0.5, 1)] == [-1e-2, -1e-4, -1e-6]
    linear = sweep_plan.read_range("x", "linear:-1:3")
    assert [linear.sample(u) for u in (0, 0.5, 1)] == [-1, 1, 3]


@pytest.mark.parametrize(
    ("total", "most", "devices", "size"),
    [(12, 4, 1, 4), (10, 4, 1, 4), (9, 8, 1, 5), (3, 100, 1, 3), (5, 100, 2, 6), (1, 1, 1, 1)],
)
def test_wave_size(total, most, devices, size):
    assert sweep_plan.wave_size(total, most, devices) == size


def test_ranks_and_front():
    assert sweep_results.ranks([3.0, None, 1.0, float("nan"), 2.0], high=False) == [3, 4, 1, 5, 2]
    assert sweep_results.ranks([3.0, 1.0], high=True) == [1, 2]
    points = [(1, 5), (2, 2), (3, 3), (4, 1), (None, 0), (1, 6)]
    assert sweep_results.pareto_front(points, (False, False)) == [0, 1, 3]
    assert sweep_results.pareto_front(points, (False, True)) == [5]


# --- Optuna -------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is optional")
def test_optuna_is_told_and_remembers(tmp_path):
    """Two waves of two trials; a resume asks for nothing twice and gives the same values."""
    base = jaxtd3.preset("Cruise", profile="cpu", **SETTINGS)
    random = [["energy=log:-1:-1e-3", "agent.gamma=linear:0.8:0.9"]]
    space = sweep_plan.read_space([["tracking=1,2"]], random, seeds=2, trials=4)
    plan = types.SimpleNamespace(config=base, space=space, at_once=4)

    def found(members):
        return [{"group": m.group, "metrics": {"x": -m.values["energy"]}} for m in members]

    def make():
        return sweep_source.make_source(plan, tmp_path, "x", high=False)

    source = make()
    assert (source.total, source.waves) == (8, 2)
    first = source.wave(0)
    assert make().wave(0) == first  # killed before it was told
    make().tell(found(first))
    second = make().wave(1)
    assert [m.group for m in second] == [2, 2, 3, 3]
    for m in [*first, *second]:
        assert -1 <= m.values["energy"] <= -1e-3
        assert 0.8 <= m.values["agent.gamma"] <= 0.9
        assert m.values["tracking"] in (1, 2)
    source = make()
    assert source.wave(0) == first
    source.tell(found(first))  # told already: no error
    source.tell(found(second))
    assert all(trial.value is not None for trial in make().study.trials)
    with pytest.raises(jaxtd3.UserError, match="this search is for x"):
        sweep_source.make_source(plan, tmp_path, "y", high=False)


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_of_a_known_policy():
    """A policy that pushes by half: speeds, distances and rates follow."""
    env = jaxtd3.batch_env(Cruise(), jaxtd3.EnvConfig(name="Cruise", num_envs=2))
    half = jaxtd3.Agent(
        None, lambda state, obs: jnp.full((*obs.shape[:-1], 1), 0.5), None, None, None
    )
    jaxtd3.register_metric("twice", lambda env, step: (2 * step.action[0], 1.0), high=True)
    try:
        chosen = metrics.metrics_of(env.env)
    finally:
        metrics._OWN.clear()
    assert next(iter(chosen)) == "tracking_error"
    assert chosen["twice"].high
    assert "foot_slip" not in chosen
    weights = jnp.array([0.0, -2.0, 1.0])
    found = jaxtd3.make_measure(env, half, chosen, 8)({}, weights, jax.random.key(0))
    assert float(found["action_rate"]) == 0
    assert float(found["survival"]) == float(found["twice"]) == 1
    assert float(found["falls_per_minute"]) == 0
    assert float(found["length"]) == 100
    assert float(found["own_reward"]) == pytest.approx(100 * (1 - 2 * 0.25), rel=1e-5)
    speed = 0.5 * (1 - 0.9 ** np.arange(1, 101))
    energy = 100 * 0.1 * 0.25 / (0.1 * speed.sum())
    assert float(found["energy_per_metre"]) == pytest.approx(energy, rel=1e-4)


def test_metrics_do_not_see_the_weights():
    env = jaxtd3.batch_env(Cruise(), jaxtd3.EnvConfig(name="Cruise", num_envs=2))
    still = jaxtd3.Agent(None, lambda state, obs: jnp.zeros((*obs.shape[:-1], 1)), None, None, None)
    measure = jax.jit(jaxtd3.make_measure(env, still, metrics.metrics_of(env.env), 4))
    a = measure({}, jnp.array([1.0, 0.0, 0.0]), jax.random.key(0))
    b = measure({}, jnp.array([4.0, -4.0, 9.0]), jax.random.key(0))
    assert {name for name in a if a[name] != b[name]} == {"own_reward"}


def test_a_fallen_robot_does_not_track():
    """Whoever falls at once is not better than whoever stands still."""
    step = types.SimpleNamespace(terminated=jnp.array(True), remaining=jnp.float32(99.0))
    error, count = metrics.until_the_end(step, jnp.float32(0.1), jnp.float32(0.8))
    assert float(error / count) == pytest.approx((0.1 + 99 * 0.8) / 100)


def test_body_velocity():
    half = np.sqrt(0.5)  # a quarter turn to the left: walking ahead is walking along y
    data = types.SimpleNamespace(
        qpos=jnp.array([0, 0, 0, half, 0, 0, half]), qvel=jnp.array([0.0, 2.0, 1.0, 0, 0, 0])
    )
    np.testing.assert_allclose(metrics.body_velocity(data), [2.0, 0.0, 1.0], atol=1e-6)


def steady_speed(command, tracking, energy, gamma=1.0):
    """The best speed for Cruise to hold under the weights: g = sum_k gamma^k dt (1 - dt)^k."""
    dt = Cruise.spec.dt
    gain = tracking * dt / (1 - gamma * (1 - dt))
    return command * gain / (gain - energy)


def test_steady_speed():
    """The best speed to hold is where the derivative of the reward vanishes."""
    speeds = np.linspace(-1, 1, 20001)
    for tracking, energy in ((1, 0), (1, -1), (4, -1)):
        reward = tracking * (1 - (speeds - 0.6) ** 2) + energy * speeds**2
        assert steady_speed(0.6, tracking, energy) == pytest.approx(
            speeds[reward.argmax()], abs=1e-3
        )


@pytest.mark.slow
def test_the_metric_ranks_right_where_the_reward_does_not(tmp_path):
    """Tracking error is least without a price on energy; rewards grow with their weights."""
    learn = ["--env", "Cruise", "--profile", "cpu", "--quiet", "--no-video", "--iterations", "250"]
    learn += ["--log-every", "50", "--eval-every", "0"]
    results = sweep(tmp_path / "known", *learn, "--grid", "energy=0,-4", "tracking=1,4")
    found = {(m["values"]["tracking"], m["values"]["energy"]): m for m in results["members"]}
    assert {m["values"]["energy"] for m in results["members"][:2]} == {0}
    assert results["best"]["values"]["energy"] == 0
    good, bad = found[1, 0]["metrics"], found[4, -4]["metrics"]
    assert good["tracking_error"] < 0.5 * bad["tracking_error"]
    assert good["own_reward"] < bad["own_reward"]  # by its own reward the worse one is better
    command = 0.4  # mean of |c|
    for (tracking, energy), m in found.items():
        lag = command - steady_speed(command, tracking, energy, gamma=0.95)
        assert m["metrics"]["tracking_error"] == pytest.approx(lag, abs=0.12)  # and getting there


# --- which environments -------------------------------------------------------------------------


def test_envs_lists_which_can_be_weighted(capsys):
    assert cli.main(["envs", "--json", "--profile", "cpu"]) == 0
    kinds = {row["env"]: row["reward"] for row in json.loads(capsys.readouterr().out)}
    assert kinds["Cruise"] == kinds["G1JoystickFlatTerrain"] == kinds["Go1Getup"] == "weighted sum"
    assert kinds["CartpoleBalance"] == kinds["H1InplaceGaitTracking"] == "fixed"


@pytest.mark.parametrize(
    ("iterations", "log", "evaluate", "expected"),
    [
        (250, 50, 250, 50),
        (1000, 50, 250, 200),
        (2000, 50, 250, 250),
        (60, 50, 100, 50),
        (9, 3, 0, 0),
    ],
)
def test_short_sweeps_have_curves(iterations, log, evaluate, expected):
    changes = {"iterations": iterations, "log_every": log, "eval_every": evaluate}
    config = jaxtd3.preset("Cruise", profile="cpu", **changes)
    assert with_curves(config).run.eval_every == expected


def test_the_seconds_of_a_wave_are_its_own():
    clock = Clock()
    clock.seconds["train"] = 1000.0  # of earlier waves
    chunks = Chunks(jaxtd3.preset("Cruise", profile="cpu", log_every=50), clock)
    found = []

    def after(state, fetched):
        found.append((state, fetched, chunks.head()["seconds"], chunks.due(100)))
        return "completed" if chunks.iteration == 100 else None

    end = chunks.loop(lambda state, iteration: (state + 1, iteration), 0, after, None)
    assert end == (2, "completed")
    assert [row[:2] + row[3:] for row in found] == [(1, 0, False), (2, 50, True)]
    assert all(0 <= seconds < 1000 for _, _, seconds, _ in found)


@pytest.mark.slow
def test_the_list_is_what_loading_finds():
    missing = {}
    for name in jaxtd3.env_names():
        try:
            spec = jaxtd3.make_env(jaxtd3.EnvConfig(name=name, num_envs=2)).spec
        except jaxtd3.UserError as error:
            missing[name] = str(error)
            continue
        found = "weighted sum" if spec.reward_terms else "fixed"
        assert reward_kind(name) in (found, "known when loaded"), name
    for name, said in missing.items():
        assert "set MENAGERIE_ROOT to a mujoco_menagerie folder" in said
        assert reward_kind(name) == "known when loaded", name


@pytest.mark.slow
def test_killed_for_real(swept, tmp_path):
    """SIGKILL at any moment after the first wave; the resumed sweep ends as the whole one."""
    run_dir = tmp_path / "sweep"
    command = [sys.executable, "-m", "jaxtd3", "sweep", "--run-dir", str(run_dir), "--no-video"]
    child = subprocess.Popen([*command, *TINY, *GRID], stdout=subprocess.DEVNULL)
    while not (run_dir / "waves" / "000").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert not (run_dir / "waves" / "002").exists()
    subprocess.run([*command, "--resume"], check=True)
    assert outcome(results_of(run_dir)) == outcome(results_of(swept))


@pytest.mark.slow
def test_relabelling_beats_starting_afresh():
    path = Path(__file__).parent.parent / "experiments" / "reward_relabel.py"
    main = runpy.run_path(str(path))["main"]
    assert main(["--seeds", "3"]) < 1


@pytest.mark.slow
def test_new_weights_count_for_all_past_data(tmp_path, capsys):
    """`train --resume --reward` relabels the ring of a run that began with --store-terms."""
    run_dir = tmp_path / "run"
    base = ["train", "--run-dir", str(run_dir), "--no-video"]
    assert cli.main([*base, *TINY, "--store-terms"]) == 0
    capsys.readouterr()
    assert cli.main([*base, "--resume", "--iterations", "16", "--reward", "energy=-3"]) == 0
    said = capsys.readouterr().out
    assert "energy" in said
    assert "keeps rewards under the old weights" not in said
    config = load_config(run_dir / "config.json")
    assert config.env.weights == {"energy": -3.0}
    env = jaxtd3.make_env(config.env)
    agent = jaxtd3.fast_td3(env.spec, config.agent)
    replay = jaxtd3.make_replay(env.spec, config.replay)
    init, *_ = jaxtd3.make_train_step(env, agent, replay, config.loop)
    state = restore_from(run_dir, jax.eval_shape(init, jax.random.key(0))).state
    np.testing.assert_array_equal(state.weights, [1.0, -3.0, 0.0])
    assert "store_terms" in fails([*base, "--resume", "--no-store-terms"], capsys)


def test_envs_says_which_can_be_weighted(capsys):
    for name, says in (("Cruise", "tracking=1"), ("CartpoleBalance", "not a weighted sum")):
        assert cli.main(["envs", "--env", name, "--profile", "cpu"]) == 0
        assert says in capsys.readouterr().out
