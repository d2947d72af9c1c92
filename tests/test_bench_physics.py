"""`bench --impl native,jax`: back ends, C alone and EnvPool, from the same states in turns."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types

import jax
import numpy as np
import pytest
from benchmarks import peers

from jaxtd3.bench import physics
from jaxtd3.cli import bench
from jaxtd3.cli import main as cli
from jaxtd3.config.sections import EnvConfig
from jaxtd3.errors import UserError

ENV = "CartpoleBalance"
CFG = EnvConfig(name=ENV, num_envs=4)


@pytest.fixture
def without_envpool(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "envpool" else found(name)
    )


@pytest.fixture(scope="module")
def native():
    return physics.BackEnd(CFG, "native", jax.random.split(jax.random.key(0), 4))


class FakePool:
    """What the bench asks of EnvPool."""

    action_space = types.SimpleNamespace(shape=(1,), dtype=np.float64)

    def __init__(self):
        self.made: tuple = ()
        self.actions: list[np.ndarray] = []
        self.resets = 0

    def list_all_envs(self):
        return ["CheetahRun-v1", f"{ENV.lower()}-v1", "G1-v1", "MuJoCoPlayground/G1-v1"]

    def make_spec(self, name):
        known = {"push_enable": True, "num_envs": 1}
        return types.SimpleNamespace(config=types.SimpleNamespace(_asdict=lambda: known))

    def make(self, name, **options):
        self.made = name, options
        return self

    def reset(self):
        self.resets += 1

    def step(self, action):
        self.actions.append(action)


@pytest.fixture
def fake(monkeypatch):
    pool, module = FakePool(), types.ModuleType("envpool")
    module.__spec__ = importlib.machinery.ModuleSpec("envpool", None)
    for name in ("list_all_envs", "make_spec", "make"):
        setattr(module, name, getattr(pool, name))
    monkeypatch.setitem(sys.modules, "envpool", module)
    return pool


# --- the command --------------------------------------------------------------------------------


def test_back_ends_beside_c_alone_in_one_run(without_envpool, capsys):
    sizes = "--num-envs 4 --rounds 3 --seconds 0.001 --envpool --json"
    assert cli.main(["bench", "--env", ENV, "--impl", "native,jax", *sizes.split()]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    rates, ratios = result["env_steps_per_second"], result["ratios"]
    assert set(rates) == {"native", "jax", "c_alone"}
    assert set(ratios) == {"native_over_jax", "native_over_c_alone"}
    for value in (*rates.values(), *ratios.values(), *result["callback"].values()):
        assert 0 < value["low"] <= value["median"] <= value["high"]
    assert result["eta_env"] == ratios["native_over_c_alone"]
    assert set(result["callback"]) == {"seam_us", "rows_us"}
    assert min(result["compile_seconds"][name] for name in ("native", "jax")) > 0
    assert (result["num_envs"], result["physics_steps"]) == (4, 1)
    assert result["errors"] == {"envpool": "not installed (pip install 'jaxtd3[envpool]')"}
    assert "native: compiling the step" in said.err
    shown = physics.lines(result)
    assert sum("EnvPool" in line for line in shown) == 1
    assert any(line.startswith("native / C alone") for line in shown)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (f"--env {ENV} --impl natve,jax", "did you mean 'native'"),
        (f"--env {ENV} --impl native,", "known are native, jax, warp"),
        (f"--env {ENV} --impl native,auto", "unknown back end 'auto'"),
        (f"--env {ENV} --impl natve --envpool", "did you mean 'native'"),
        (f"--env {ENV} --impl natve", "did you mean 'native'"),
        (f"--env {ENV} --impl native,jax --breakdown", "--breakdown and --impl with a list"),
        (f"--env {ENV} --peers --envpool", "one at a time"),
        ("--env Pendulum --impl native,jax", "no physics back ends"),
        (f"--env {ENV} --impl native,jax --randomize", "has one model"),
    ],
)
def test_mistakes_are_one_line(flags, says, capsys):
    assert cli.main(["bench", *flags.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert says in said.err


def test_one_back_end_goes_to_the_config_as_before(monkeypatch):
    seen = []
    monkeypatch.setitem(
        bench.MODES, "measure", lambda args, config: (seen.append(config), ({}, []))[1]
    )
    assert cli.main(["bench", "--env", ENV, "--impl", "jax"]) == 0
    assert seen[0].env.impl == "jax"


def test_back_ends_are_named_once():
    assert bench.back_ends("jax,native,jax") == ["jax", "native"]
    assert bench.back_ends("auto") == ["native"]


# --- figures ------------------------------------------------------------------------------------


def test_ratios_are_of_the_same_round():
    """A slow round slows both: the ratio of medians would be 0.5."""
    times = {"native": [1.0, 9.0, 2.0], "c_alone": [1.0, 3.0, 0.5], "seam": [1e-6, 2e-6, 3e-6]}
    found = physics.figures(times, "native")
    assert found["eta_env"] == {"median": 1 / 3, "low": 0.25, "high": 1.0}
    assert found["env_steps_per_second"]["native"] == {"median": 0.5, "low": 1 / 9, "high": 1.0}
    assert found["callback"] == {"seam_us": pytest.approx({"median": 2, "low": 1, "high": 3})}


def test_c_alone_takes_the_steps_from_the_first_states(native):
    alone = physics.Alone(native, 4)
    first = np.asarray(native.states.state.data.qpos)
    task = alone.task(7)
    assert task.units == 7 * 4
    for _ in range(2):
        task.prepare()
        np.testing.assert_allclose(alone.batch.bind("qpos"), first, rtol=1e-6)
        begun = alone.batch.bind("time").copy()
        task.run()
        spent = alone.batch.bind("time") - begun
        np.testing.assert_allclose(spent, 7 * native.env.spec.dt, rtol=1e-6)
        assert not np.allclose(alone.batch.bind("qpos"), first)


def test_a_scan_takes_the_steps_from_the_first_states(native):
    actions = jax.random.uniform(jax.random.key(1), (7, 4, 1), minval=-1.0)
    task = native.task(actions)
    assert task.units == 7 * 4
    ends = []
    for _ in range(2):
        task.run()
        ends.append(np.asarray(native.last[0].state.data.qpos))
    np.testing.assert_array_equal(*ends)
    assert not np.allclose(ends[0], native.states.state.data.qpos)
    assert native.ended() == 0.0


# --- EnvPool ------------------------------------------------------------------------------------


def test_envpool_gets_the_same_sizes(fake):
    task = physics.envpool_task(CFG, threads=3, steps=5)
    sizes = {"num_envs": 4, "num_threads": 3, "seed": 0, "push_enable": False}
    assert fake.made == (f"{ENV.lower()}-v1", {"env_type": "gymnasium", **sizes})
    task.prepare()
    task.run()
    assert (fake.resets, len(fake.actions), task.units) == (1, 5, 20)
    actions = np.stack(fake.actions)
    assert actions.shape == (5, 4, 1)
    assert -1 <= actions.min() < -0.5 < 0.5 < actions.max() <= 1


def test_envpool_knows_playground_by_its_own_name(fake):
    known = fake.list_all_envs()
    assert physics.envpool_name("G1", known) == "MuJoCoPlayground/G1-v1"
    assert physics.envpool_name("CheetahRun", known) == "CheetahRun-v1"
    with pytest.raises(UserError, match="it has no Cruise"):
        physics.envpool_name("Cruise", known)


def test_envpool_is_a_peer(fake, monkeypatch):
    monkeypatch.setattr(physics, "MOST", 2)
    row = peers.attempt(peers.PEERS["envpool"].run, ENV, 1)
    assert row["env_steps_per_second"]["median"] > 0
    assert row["settings"]["num_envs"] == fake.made[1]["num_envs"]


def test_a_missing_envpool_is_told_among_the_peers(without_envpool):
    row = peers.attempt(peers.PEERS["envpool"].run, ENV, 1)
    shown = peers.lines({"rates": {"envpool": row}, "scaled": {}})
    assert shown[1] == f"{'EnvPool, steps alone':<28}cannot run: {row['error']}"
    assert row["error"].startswith("not installed")
