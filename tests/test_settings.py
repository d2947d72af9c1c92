"""Settings: what a field says of itself is what the program does with it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxtd3
from jaxtd3.agent.critics import CRITICS
from jaxtd3.agent.exploration import LADDERS
from jaxtd3.cli import train
from jaxtd3.cli.main import Train, main
from jaxtd3.config import sections
from jaxtd3.config.config import config_from_dict
from jaxtd3.loop.traced import retune, traced_values
from jaxtd3.nets.mlp import ACTIVATIONS, NETWORKS
from jaxtd3.replay.symmetry import SYMMETRIES

SPEC = jaxtd3.EnvSpec("pendulum", obs_size=3, action_size=1, episode_length=200)
PENDULUM = jaxtd3.preset("Pendulum", profile="cpu", num_envs=4, batch_size=16, length=16)


def test_names_are_those_of_the_tables():
    assert set(sections.CRITICS) == set(CRITICS)
    assert set(sections.NETWORKS) == set(NETWORKS)
    assert set(sections.ACTIVATIONS) == set(ACTIVATIONS)
    assert set(sections.LADDERS) == set(LADDERS)
    for name in sections.COMBINES:
        jaxtd3.AgentConfig(cdq_target=name)
    for name in ("off", *SYMMETRIES):
        jaxtd3.ReplayConfig(symmetry=name)


def test_what_is_added_to_a_table_can_be_named(monkeypatch):
    with pytest.raises(ValueError, match="mine"):
        jaxtd3.AgentConfig(critic="mine")
    monkeypatch.setitem(CRITICS, "mine", CRITICS["c51"])
    assert jaxtd3.AgentConfig(critic="mine").critic == "mine"


def test_lengths_are_those_of_the_run():
    """Of whatever run it becomes: a saved config with other iterations has its own schedules."""
    assert PENDULUM.agent.schedule_updates is None
    longer = config_from_dict(json.loads(json.dumps(PENDULUM.to_dict())))
    longer = longer.override({"iterations": 10 * PENDULUM.run.iterations})
    updates = longer.run.iterations * longer.loop.critic_updates
    assert longer.resolved().agent.schedule_updates == updates
    assert PENDULUM.override({"noise_steps": 7}).resolved().loop.noise_steps == 7


def test_a_file_with_other_iterations_has_schedules_of_its_own(tmp_path):
    file = tmp_path / "old.json"
    old = jaxtd3.preset("Pendulum", profile="cpu", iterations=100)
    old.save(file)
    args = dataclasses.replace(Train(env="Pendulum"), config=file)
    config, _ = train.settings(args, {"iterations": 1000})
    assert config.resolved().agent.schedule_updates == 1000 * old.loop.critic_updates


def test_priorities_of_a_resumed_run_follow_its_settings():
    old = PENDULUM.override({"prioritized": True, "priority_steps": 50})
    env = jaxtd3.make_env(old.env)
    agent = jaxtd3.fast_td3(env.spec, old.agent)
    fns = jaxtd3.make_train_step(env, agent, jaxtd3.make_replay(env.spec, old.replay), old.loop)
    state = fns.init(jax.random.key(0))
    assert state.replay.hyper.steps == 50
    new = old.override({"priority_steps": 80, "priority_beta": 0.7, "gamma": 0.5})
    state = retune(state, traced_values(new, env.spec))
    np.testing.assert_allclose(state.replay.hyper.steps, 80)
    np.testing.assert_allclose(state.replay.hyper.beta, 0.7, rtol=1e-6)
    np.testing.assert_allclose(state.agent.hyper.gamma, 0.5)


@pytest.mark.parametrize("name", sorted(sections.TRACED - {"run.seed", "env.weights"}))
def test_what_is_traced_reaches_the_program(name):
    """Else a run that is resumed with another value would tell of it and go on with the old one."""
    field = name.partition(".")[2]
    old = PENDULUM.resolved().by_name()[field]
    new = PENDULUM.override({field: round(old / 2) if isinstance(old, int) else old / 2 or 0.5})
    values = [jax.tree.leaves(traced_values(config, SPEC)) for config in (PENDULUM, new)]
    assert sum(not np.array_equal(a, b) for a, b in zip(*values, strict=True)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("normalize_obs", False), ("normalize_reward", True), ("noise_hold", 4), ("num_envs", 8)],
)
def test_what_weights_mean_cannot_change_on_resume(name, value):
    with pytest.raises(jaxtd3.UserError, match=f"cannot change {name}"):
        train.compare_saved(PENDULUM, PENDULUM.override({name: value}))


def test_what_may_change_on_resume_is_told():
    notes = train.compare_saved(PENDULUM, PENDULUM.override({"priority_steps": 9, "tau": 0.5}))
    assert notes == ["changed since: tau: 0.1 -> 0.5", "changed since: priority_steps: None -> 9"]


def test_help_shows_the_values_of_the_preset(capsys):
    for env, shown in (("Cruise", "(0.95)"), ("Pendulum", "(0.99)")):
        with pytest.raises(SystemExit) as stop:
            main(["train", "--env", env, "--profile", "cpu", "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        line = next(line for line in text.splitlines() if "--gamma" in line)
        assert shown in line, line


def test_every_setting_says_what_it_is():
    for cls in sections.SECTIONS.values():
        for f in dataclasses.fields(cls):
            assert set(f.metadata) == {"help", "traced", "kept", "derived", "symbol"}, f.name
            assert f.metadata["help"].endswith("."), f.name
