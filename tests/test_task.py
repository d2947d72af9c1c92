"""`MujocoTask`: a model and one-line functions as an environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from jaxtd3 import EnvConfig, UserError, make_env
from jaxtd3.cli.policy import env_row
from jaxtd3.envs import registry, source
from jaxtd3.envs.batch import batch_env
from jaxtd3.envs.robot import set_timestep
from jaxtd3.envs.task import MujocoTask, near, sq

ENV = Path(__file__).parent / "data" / "quadruped" / "env.py"
module = source.find(f"{ENV}:Stand").module
Stand, Walk = module.Stand, module.Walk
PRESET = {"impl": "jax"}


@pytest.fixture(scope="module")
def stand():
    return Stand()


def run(env, actions, seed=0, record=lambda out: out):
    """Step one environment: the stacked outputs."""

    def step(state, action):
        out = env.step(state, action)
        return out.state, record(out)

    state, obs = env.reset(jax.random.key(seed))
    return obs, jax.jit(lambda s: jax.lax.scan(step, s, actions)[1])(state)


def test_the_spec_is_read_from_the_tables(stand):
    spec = stand.spec
    assert (spec.obs_size, spec.extra_size, spec.action_size) == (3 + 3 + 8 + 8 + 8, 4, 8)
    assert spec.reward_terms == ("upright", "effort", "action_rate")
    assert spec.default_weights == (1.0, -1e-4, -0.1)
    assert (spec.dt, spec.episode_length, spec.reward_scale) == (0.02, 40, 0.02)
    assert [p.name for p in stand.layout][-2:] == ["velocity", "height"]
    assert stand.layout[-1].stop == spec.width


def test_it_is_c_mujoco_step_by_step(stand):
    """The same controls through `mj_step` give the same observations and terms."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (12, 8)).astype(np.float32)
    state, _ = stand.reset(jax.random.key(1))
    model = stand.mj_model
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = state.state.data.qpos, state.state.data.qvel
    data.qacc_warmstart[:] = state.state.data.qacc_warmstart
    step, before = jax.jit(stand.step), np.zeros(8)
    home = model.key_ctrl[0]
    for action in actions:
        out = step(state, action)
        state = out.state
        data.ctrl[:] = np.clip(home + 0.5 * action, *model.actuator_ctrlrange.T)
        mujoco.mj_step(model, data, nstep=5)
        np.testing.assert_allclose(state.state.data.qpos, data.qpos, atol=2e-4)
        np.testing.assert_allclose(out.obs[:3], data.sensor("gyro").data, atol=2e-2)
        np.testing.assert_allclose(out.obs[6:14], data.qpos[7:] - model.key_qpos[0, 7:], atol=2e-4)
        np.testing.assert_allclose(out.obs[22:30], action)
        np.testing.assert_allclose(out.obs[33], data.qpos[2], atol=2e-4)
        np.testing.assert_allclose(out.terms[1], np.sum(data.actuator_force**2), rtol=1e-2)
        np.testing.assert_allclose(out.terms[2], np.sum((action - before) ** 2), rtol=1e-5)
        weighted = 0.02 * np.dot(out.terms, [1.0, -1e-4, -0.1])
        np.testing.assert_allclose(out.reward, weighted, rtol=1e-5)
        before = action


def test_up_and_velocity_are_seen_from_the_base(stand):
    """Tilted by 0.3 rad about y and moving along the world's x."""
    state, _ = stand.reset(jax.random.key(0))
    qpos = (
        jnp.asarray(state.state.data.qpos)
        .at[3:7]
        .set(jnp.array([np.cos(0.15), 0.0, np.sin(0.15), 0.0]))
    )
    qvel = jnp.zeros(14).at[0].set(2.0)
    data = state.state.data.replace(qpos=qpos, qvel=qvel)
    s = stand.view(state._replace(state=state.state.replace(data=data)))
    np.testing.assert_allclose(s.up, [-np.sin(0.3), 0, np.cos(0.3)], atol=1e-6)
    np.testing.assert_allclose(s.velocity, [2 * np.cos(0.3), 0, 2 * np.sin(0.3)], atol=1e-6)


def test_weights_are_traced_and_terms_raw(stand):
    """A batch under other weights pays their sum, out of the same program's terms."""
    cfg = EnvConfig(num_envs=4, weights={"upright": 0.0, "effort": 0.0, "action_rate": 2.0})
    env = batch_env(stand, cfg)
    action = jnp.full((4, 8), 0.5)
    _, seen, _ = jax.jit(env.step)(env.init(jax.random.key(0)), action, jax.random.key(1))
    np.testing.assert_allclose(seen.terms[:, 2], 8 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(seen.reward, 0.02 * 2.0 * 8 * 0.25, rtol=1e-5)


def test_terminations_end_an_episode(stand):
    state, _ = stand.reset(jax.random.key(0))
    over = jnp.asarray(state.state.data.qpos).at[3:7].set(jnp.array([0.0, 1.0, 0.0, 0.0]))
    tipped = state._replace(state=state.state.replace(data=state.state.data.replace(qpos=over)))
    step = jax.jit(stand.step)
    assert bool(step(tipped, jnp.zeros(8)).terminated)
    assert not bool(step(state, jnp.zeros(8)).terminated)


def test_resets_differ_and_stay_within_limits(stand):
    keys = jax.random.split(jax.random.key(0), 64)
    state, obs = jax.jit(jax.vmap(stand.reset))(keys)
    joints = np.asarray(state.state.data.qpos[:, 7:])
    low, high = stand.mj_model.jnt_range[1:].T
    assert np.all(joints >= low - 1e-6)
    assert np.all(joints <= high + 1e-6)
    assert 0.05 < np.ptp(joints, axis=0).min() <= 0.2
    assert len({float(x) for x in obs[:, 0]}) > 60


def test_randomised_friction_changes_the_motion(stand):
    rough = Stand(EnvConfig(randomize=True))
    states, _ = jax.jit(jax.vmap(rough.reset))(jax.random.split(jax.random.key(0), 32))
    ratio = np.asarray(states.model[0])[:, 0, 0] / stand.mj_model.geom_friction[0, 0]
    assert 0.3 <= ratio.min() < 0.7 < 1.1 < ratio.max() <= 1.5
    actions = jnp.tile(jnp.array([[1.0, 0.0], [-1.0, 0.0]]).repeat(10, 0), (1, 4))
    one = jax.tree.map(lambda x: x[0], states)
    other = one._replace(model=(one.model[0] * 0.1,))
    step = jax.jit(rough.step)
    for action in actions:
        one, other = step(one, action).state, step(other, action).state
    assert np.abs(one.state.data.qpos - other.state.data.qpos).max() > 1e-3


def test_pushes_come_only_when_asked_for(stand):
    speeds = {}
    for push in (False, True):
        env = Stand(EnvConfig(push=push))
        _, qvel = run(env, jnp.zeros((30, 8)), record=lambda out: out.state.state.data.qvel[:2])
        speeds[push] = np.abs(np.diff(np.asarray(qvel), axis=0)).max()
    assert speeds[True] > 0.1 > speeds[False]


def test_commands_are_drawn_within_their_ranges_and_drawn_again():
    env = Walk()
    _, commands = run(env, jnp.zeros((60, 8)), record=lambda out: out.obs[30:33])
    commands = np.asarray(commands)
    low, high = np.array(env.command_ranges).T
    assert np.all(commands >= low)
    assert np.all(commands <= high)
    changes = np.any(np.diff(commands, axis=0) != 0, axis=1).sum()
    assert 3 <= changes <= 30  # one in five, on average


def test_only_what_is_read_is_carried(stand):
    assert "site_xpos" not in stand.physics.reads
    assert "site_xpos" in Walk().physics.reads
    state, _ = stand.reset(jax.random.key(0))
    assert state.state.data.site_xpos is None


def test_noise_is_on_the_actors_observation_alone():
    class Noisy(Stand):
        observation_noise = {"up": 0.5}  # noqa: RUF012

    clean, noisy = Stand(), Noisy()
    (_, a), (_, b) = (env.reset(jax.random.key(0)) for env in (clean, noisy))
    different = np.flatnonzero(np.asarray(a) != np.asarray(b))
    assert list(different) == [3, 4, 5]


def test_states_keep_their_type_and_their_own_random_numbers(stand):
    env = batch_env(stand, EnvConfig(num_envs=4, episode_length=2))
    step = jax.jit(env.step)
    state = env.init(jax.random.key(0))
    for i in range(5):
        state, *_ = step(state, jnp.zeros((4, 8)), jax.random.key(i))
    assert step._cache_size() == 1
    keys = np.asarray(state.inner.state.info["rng"])
    assert len({tuple(k) for k in keys}) == 4


@pytest.mark.slow
def test_native_and_mjx_agree():
    actions = 0.3 * jax.random.normal(jax.random.key(5), (8, 8))
    _, native = run(Stand(EnvConfig(impl="native")), actions)
    _, mjx = run(Stand(EnvConfig(impl="jax")), actions)
    np.testing.assert_allclose(native.obs, mjx.obs, atol=2e-3)
    np.testing.assert_allclose(native.reward, mjx.reward, atol=1e-4)


def test_limits_reach_every_joints_ends():
    env = Stand(EnvConfig(action_bounds="limits"))
    reach = env.pose + 0.5 * np.asarray(env.bounds.up)
    np.testing.assert_allclose(reach, env.mj_model.jnt_range[1:, 1], rtol=1e-5)


def test_motors_without_scale_span_their_range():
    from jaxtd3.envs.balance import Balance

    env = Balance()
    np.testing.assert_allclose(env.control(jnp.array([-1.0])), [-1.0])
    np.testing.assert_allclose(env.control(jnp.array([0.5])), [0.5])


def test_mistakes_are_told_in_a_line():
    def made(**table):
        return type("Bad", (Stand,), table)()

    with pytest.raises(UserError, match="unknown sensor 'gyr': did you mean 'gyro'"):
        made(observations={"x": lambda s: s.sensor("gyr")})
    with pytest.raises(UserError, match=r"reward tall returns an array of shape \(3,\)"):
        made(rewards={"tall": (1.0, lambda s: s.up)})
    with pytest.raises(UserError, match="reward 'tall' is not"):
        made(rewards={"tall": lambda s: s.up[2]})
    with pytest.raises(UserError, match="does not divide"):
        made(sim_dt=0.003)
    with pytest.raises(UserError, match="no such MJCF"):
        made(mjcf="nowhere.xml")
    with pytest.raises(UserError, match="unknown keyframe 'hme'"):
        made(keyframe="hme")
    with pytest.raises(UserError, match="no rewards"):
        made(rewards={})
    with pytest.raises(UserError, match="no randomization"):
        type("Plain", (Stand,), {"randomization": {}})(EnvConfig(randomize=True))
    with pytest.raises(UserError, match="no pushes"):
        type("Plain", (Stand,), {"push_speed": 0.0})(EnvConfig(push=True))
    with pytest.raises(UserError, match="the task has no command"):
        made(observations={"x": lambda s: s.command})


def test_what_keeps_mjx_away_is_one_line(tmp_path):
    text = """<mujoco><worldbody>
      <geom type="box" size="1 1 0.1"/>
      <body pos="0 0 1"><freejoint/><geom type="cylinder" size="0.1 0.1"/>
        <body><joint name="j" axis="0 1 0"/><geom size="0.1" pos="1 0 0"/></body></body>
    </worldbody><actuator><motor joint="j" ctrlrange="-1 1"/></actuator></mujoco>"""
    (tmp_path / "m.xml").write_text(text)

    class Cylinder(MujocoTask):
        mjcf = tmp_path / "m.xml"
        observations = {"up": lambda s: s.up}  # noqa: RUF012
        rewards = {"up": (1.0, lambda s: s.up[2])}  # noqa: RUF012

    with pytest.raises(UserError, match=r"Cylinder on jax: .*CYLINDER.*; --impl native runs it"):
        Cylinder(EnvConfig(impl="jax"))
    assert Cylinder().spec.obs_size == 3


@pytest.mark.parametrize("field", ["qfrc_inverse", "efc_force"])
def test_what_native_physics_does_not_return_is_one_line(field):
    """In what a reset observes, and in what only a step reads; a slip of the user's is no such."""
    read = lambda s: getattr(s.data, field).sum()  # noqa: E731
    cfg = EnvConfig(num_envs=1, impl="native")
    for table in ({"observations": {"x": read}}, {"rewards": {"x": (1.0, read)}}):
        with pytest.raises(UserError, match=rf"^Bad on native physics: .*{field}.*--impl jax runs"):
            type("Bad", (Stand,), table)(cfg)
    with pytest.raises(AttributeError, match="no attribute 'qpso'"):
        type("Bad", (Stand,), {"rewards": {"x": (1.0, lambda s: s.data.qpso[0])}})(cfg)


def test_the_list_tells_the_engine_that_a_task_asks_for(monkeypatch):
    monkeypatch.setitem(registry._OWN, "Chosen", type("Chosen", (Stand,), {"preset": PRESET}))
    assert env_row("Chosen", "cpu", detailed=False)["physics"] == "jax"


@pytest.mark.parametrize("timestep", [0.0, -1.0, float("nan"), 0.03])
def test_a_timestep_that_divides_nothing_is_refused(timestep):
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    model.opt.timestep = timestep
    with pytest.raises(UserError, match="does not divide"):
        set_timestep(model, "Stand", 0.02, None)


def test_helpers():
    assert float(sq(jnp.array([3.0, 4.0]))) == 25.0
    np.testing.assert_allclose(near(jnp.array([0.3, 0.4]), 0.5), np.exp(-1), rtol=1e-6)


def test_balance_is_a_registered_environment():
    env = make_env(replace(EnvConfig("Balance"), num_envs=2))
    assert env.spec.reward_terms == ("upright", "middle", "effort")


@pytest.mark.slow
def test_balance_learns(tmp_path):
    import json

    from jaxtd3.cli.main import main

    run = tmp_path / "run"
    assert main(["train", "--env", "Balance", "--run-dir", str(run), "--no-video", "--quiet"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["first_return"] < 5.0
    assert summary["final_return"] > 13.0
    assert summary["final_length"] > 450
