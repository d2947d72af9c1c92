"""The actor's last observations as one: windows in the environment, in the ring, everywhere."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtd3
from jaxtd3.cli.main import main
from jaxtd3.config.sections import ReplayConfig
from jaxtd3.core.types import EnvSpec, Transition
from jaxtd3.envs.hidden import HiddenEnv
from jaxtd3.envs.history import HistoryEnv
from jaxtd3.envs.playground.layout import observation_layout
from jaxtd3.envs.playground.mirror import mirror_of, reflect
from jaxtd3.play.session import Session
from jaxtd3.replay import ring
from jaxtd3.run.checkpoint import CheckpointStore, restore_from, state_sha256
from jaxtd3.run.policy import save_policy
from jaxtd3.run.program import build

T1 = "T1JoystickFlatTerrain"
RUN, TERM, TRUNC, BAD = 0, 1, 2, 3
F, EXTRA, NUM = 2, 1, 3
ADD = jax.jit(ring.add, static_argnames="store_next_obs")
WINDOWS = jax.jit(ring.windows, static_argnames=("spec", "cfg"))


# --- the ring against a plain model -------------------------------------------------------------


class Model:
    """Episodes of frames [F + EXTRA] as lists; what is observed is read off them with a loop."""

    def __init__(self, seed: int, history: int, limit: int):
        self.rng, self.history, self.limit = np.random.default_rng(seed), history, limit
        self.episodes = [[self.frame()] for _ in range(NUM)]
        self.obs, self.final, self.kind = [], [], []  # of every write: [NUM, ..]

    def frame(self) -> np.ndarray:
        return self.rng.normal(size=F + EXTRA).astype(np.float32)

    def window(self, frames: list[np.ndarray]) -> np.ndarray:
        first = [frames[0]] * (self.history - len(frames))
        seen = [*first, *frames][-self.history :]
        return np.concatenate([*(frame[:F] for frame in seen), frames[-1][F:]])

    def write(self) -> Transition:
        obs = np.stack([self.window(frames) for frames in self.episodes])
        kind = self.rng.choice([RUN, TERM, BAD], p=[0.8, 0.12, 0.08], size=NUM)
        late = np.array([len(frames) >= self.limit for frames in self.episodes])
        kind = np.where((kind == RUN) & late, TRUNC, kind)
        for frames in self.episodes:
            frames.append(self.frame())
        final = np.stack([self.window(frames) for frames in self.episodes])
        self.episodes = [
            frames if k == RUN else [self.frame()]
            for frames, k in zip(self.episodes, kind, strict=True)
        ]
        for stored, x in ((self.obs, obs), (self.final, final), (self.kind, kind)):
            stored.append(x)
        return Transition(
            obs=jnp.asarray(obs),
            action=jnp.zeros((NUM, 1)),
            reward=jnp.zeros(NUM),
            terms=jnp.zeros((NUM, 0)),
            terminated=jnp.asarray(kind == TERM),
            truncated=jnp.asarray(kind == TRUNC),
            final_obs=jnp.asarray(np.where((kind == BAD)[:, None], np.nan, final)),
            valid=jnp.asarray(kind != BAD),
        )

    def next(self, start: int, env: int, steps: int) -> np.ndarray | None:
        """What is observed after a window of at most so many steps; None where nothing needs it."""
        for t in range(start, start + steps):
            kind = self.kind[t][env]
            newest = t == len(self.kind) - 1
            if kind == BAD or (kind == RUN and newest):
                return self.obs[t][env] if t > start else None
            if kind != RUN:
                return self.final[t][env] if kind == TRUNC else None
        return self.obs[start + steps][env]


def spec_of(history: int, limit: int) -> EnvSpec:
    return EnvSpec("model", F * history, 1, limit, EXTRA, history=history)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    writes=st.integers(2, 40),
    history=st.sampled_from([2, 4]),
    n_step=st.sampled_from([1, 3]),
    limit=st.sampled_from([1, 3, 7]),
    store_next_obs=st.booleans(),
)
def test_windows_are_what_was_seen(seed, writes, history, n_step, limit, store_next_obs):
    """Every window of the ring is what the environment showed, and none crosses an episode's
    start: the first observation of an episode stands for those before it."""
    length = 11
    spec = spec_of(history, limit)
    cfg = ReplayConfig(length, 4, n_step, store_next_obs=store_next_obs)
    model, state = Model(seed, history, limit), ring.init(spec, cfg, NUM)
    for _ in range(writes):
        state = ADD(state, model.write(), store_next_obs=store_next_obs)
    size = min(writes, length)
    starts = int(ring.num_starts(state, spec, cfg))
    assert starts == size - (history - 1) - (not store_next_obs)
    offset, env = (x.ravel() for x in np.meshgrid(np.arange(length), np.arange(NUM)))
    batch = jax.device_get(WINDOWS(state, offset, env, jnp.float32(0.9), spec=spec, cfg=cfg))
    for i, (o, e) in enumerate(zip(offset, env, strict=True)):
        if not history - 1 <= o < history - 1 + starts or batch.weight[i] == 0:
            continue
        start = writes - size + o
        np.testing.assert_array_equal(batch.obs[i], model.obs[start][e])
        following = None if store_next_obs else model.next(start, e, n_step)
        if store_next_obs and n_step == 1:
            following = model.final[start][e]
        if following is not None and batch.discount[i] > 0:
            np.testing.assert_array_equal(batch.next_obs[i], following)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(batch))


@pytest.mark.parametrize("writes", [1, 2, 3, 4, 9, 30])
@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_what_is_drawn_was_seen(writes, kind):
    """Nothing is drawn whose window has been overwritten in part, and over time all the rest."""
    spec = spec_of(3, 5)
    cfg = ReplayConfig(length=8, batch_size=256, prioritized=kind == "prioritized")
    replay, model = jaxtd3.make_replay(spec, cfg), Model(1, 3, 5)
    state, add = replay.init(NUM), jax.jit(replay.add)
    for _ in range(writes):
        state = add(state, model.write())
    batch = jax.device_get(replay.sample(state, jax.random.key(0), jnp.float32(0.9)))
    size = min(writes, 8)
    possible = [
        model.obs[t][e]
        for t in range(writes - size + 2, writes - 1)
        for e in range(NUM)
        if model.kind[t][e] != BAD
    ]
    assert batch.weight.any() == bool(possible)
    drawn = batch.obs[batch.weight > 0]
    if possible:
        match = (drawn[:, None] == np.stack(possible)[None]).all(-1)
        assert match.any(1).all(), "a window that nobody saw"
        assert match.any(0).all(), "a start that is never drawn"


def test_the_ring_does_not_grow():
    """Bytes per transition of G1 with five observations, against one: the same."""
    one = EnvSpec("G1", 103, 29, 1000, 62)
    five = dataclasses.replace(one, obs_size=5 * 103, history=5)
    sizes = [ring.bytes_per_transition(s, ReplayConfig(length=1024), 4) for s in (one, five)]
    assert sizes[1] == sizes[0]
    with pytest.raises(ValueError, match="length=5 is too short for history=5"):
        jaxtd3.make_replay(five, ReplayConfig(length=5))


# --- the environment and the agent --------------------------------------------------------------


def test_the_environment_and_the_ring_show_the_same():
    """Pendulum with resets: what was acted upon is what is sampled; resets fill the window."""
    cfg = jaxtd3.EnvConfig("Pendulum", num_envs=2, episode_length=7, history=3, stagger=True)
    env = jaxtd3.make_env(cfg)
    assert (env.spec.obs_size, env.spec.frame_width) == (9, 3)
    replay = ReplayConfig(length=32, batch_size=4)
    state, stored = env.init(jax.random.key(0)), ring.init(env.spec, replay, 2)
    first = np.asarray(state.obs).reshape(2, 3, 3)
    np.testing.assert_array_equal(first, np.repeat(first[:, :1], 3, axis=1))
    step, rows = jax.jit(env.step), []
    for i in range(20):
        state, tr, _ = step(state, jnp.full((2, 1), 0.3), jax.random.key(i))
        stored = ADD(stored, tr)
        rows.append(jax.device_get(tr))
    offset, num = (x.ravel() for x in np.meshgrid(np.arange(2, 19), np.arange(2)))
    batch = jax.device_get(
        WINDOWS(stored, offset, num, jnp.float32(0.9), spec=env.spec, cfg=replay)
    )
    resets = 0
    for o, e, obs, after in zip(offset, num, batch.obs, batch.next_obs, strict=True):
        np.testing.assert_array_equal(obs, rows[o].obs[e])
        np.testing.assert_array_equal(after, rows[o].final_obs[e])
        frames = obs.reshape(3, 3)
        if rows[o - 1].done[e]:
            resets += 1
            np.testing.assert_array_equal(frames, np.repeat(frames[:1], 3, axis=0))
        else:
            np.testing.assert_array_equal(frames[:2], rows[o - 1].obs[e].reshape(3, 3)[1:])
    assert resets > 3


def test_statistics_are_of_one_observation_and_the_critic_sees_all():
    spec = spec_of(3, 10)
    agent = jaxtd3.fast_td3(spec, jaxtd3.AgentConfig(actor_hidden=16, critic_hidden=16))
    state, tr = agent.init(jax.random.key(0)), Model(0, 3, 10).write()
    state = agent.observe(state, tr._replace(valid=jnp.ones(NUM, bool)), jnp.zeros(NUM))
    np.testing.assert_allclose(state.obs_stats.mean, jnp.mean(tr.obs[:, 2 * F :], 0), rtol=1e-6)
    mean = np.asarray(spec.repeated(state.obs_stats.mean))
    np.testing.assert_array_equal(mean[: 3 * F].reshape(3, F), np.tile(mean[:F], (3, 1)))
    assert (spec.critic_size, mean.size) == (3 * F + EXTRA, 3 * F + EXTRA)
    for part in (slice(0, F), slice(2 * F, 3 * F)):  # the actor sees old and new
        other = tr.obs.at[:, part].add(1.0)
        assert np.abs(agent.act(state, other) - agent.act(state, tr.obs)).max() > 1e-4


# --- whole runs ---------------------------------------------------------------------------------


@functools.cache
def pendulum(**changes):
    small = {"num_envs": 4, "batch_size": 16, "log_every": 4, "warmup": 3, "length": 32}
    small |= {"actor_hidden": 8, "critic_hidden": 8, "eval_episodes": 2, "history": 3}
    return build(jaxtd3.preset("Pendulum", profile="cpu", **small | changes))


def test_resumed_to_the_bit(tmp_path):
    program = pendulum(n_step=3, episode_length=9)
    state, _ = program.advance(program.start())
    store = CheckpointStore(tmp_path)
    store.save(state, iteration=4, meta={"config": {}})
    store.wait()
    assert store.last_error is None
    restored = restore_from(tmp_path, program.shapes).state
    assert state_sha256(restored) == state_sha256(state)
    ends = [state_sha256(program.advance(s)[0]) for s in (state, restored)]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_members_of_a_population_are_single_runs():
    cfg = pendulum(n_step=3, episode_length=9).config
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    members = [cfg, cfg.override({"seed": 1})]
    init, train_step = jaxtd3.make_population(env, agent, replay, members)
    state, _ = jaxtd3.make_chunk(train_step, 5)(init())
    fns = jaxtd3.make_train_step(env, agent, replay, cfg.loop)
    for i in range(2):
        one, _ = jaxtd3.make_chunk(fns.train_step, 5)(fns.init(jax.random.key(i)))
        np.testing.assert_allclose(state.env.obs[i], one.env.obs, rtol=1e-3, atol=1e-4)
        assert np.abs(state.env.obs[i]).max() > 0.1


# --- robots -------------------------------------------------------------------------------------


@functools.cache
def robot():
    env = jaxtd3.make_env(jaxtd3.EnvConfig(T1, num_envs=2, physics_threads=1)).env
    return HiddenEnv(env, ("linvel",))


def test_every_frame_of_a_window_is_mirrored():
    seen = HistoryEnv(robot(), 3)
    one, three = mirror_of(robot()), mirror_of(seen)
    x = np.random.default_rng(0).normal(size=(5, seen.spec.width)).astype(np.float32)
    image, size = np.asarray(reflect(three.obs, jnp.asarray(x))), robot().spec.obs_size
    for k in range(3):
        frame = np.concatenate([x[:, k * size : (k + 1) * size], x[:, 3 * size :]], axis=1)
        expected = np.asarray(reflect(one.obs, jnp.asarray(frame)))
        np.testing.assert_array_equal(image[:, k * size : (k + 1) * size], expected[:, :size])
    np.testing.assert_array_equal(image[:, 3 * size :], expected[:, size:])
    assert len(three.labels) == seen.spec.width


def test_the_layout_names_every_part_of_the_window():
    seen = HistoryEnv(robot(), 3)
    parts = observation_layout(seen, privileged=True)
    assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]]
    assert parts[-1].stop == seen.spec.width
    named = {p.name: p for p in observation_layout(seen)}
    size = robot().spec.obs_size
    assert named["gyro"].start - named["gyro-2"].start == 2 * size
    assert named["sin_phase"].stop == seen.spec.obs_size
    assert "linvel" not in named


@pytest.mark.slow
def test_carried_away_and_played(tmp_path, capsys):
    """A policy file: its controller with the history as state, its ONNX, played."""
    hides = {"actor_hides": "linvel", "history": 3, "actor_hidden": 16, "impl": "native"}
    config = jaxtd3.preset(T1, profile="cpu", **hides)
    env = jaxtd3.make_env(dataclasses.replace(config.env, num_envs=1, physics_threads=1))
    agent = jaxtd3.fast_td3(env.spec, config.agent)
    policy, state = tmp_path / "seen.npz", agent.init(jax.random.key(0))
    save_policy(policy, state, config, {})
    out = tmp_path / "controller.onnx"
    assert main(["export", str(policy), "--controller", "--out", str(out)]) == 0
    assert main(["export", "--check", str(out)]) == 0
    assert main(["export", str(policy), "--out", str(tmp_path / "policy.onnx")]) == 0
    import onnx

    about = {p.key: p.value for p in onnx.load(out).metadata_props}
    assert (json.loads(about["hidden"]), json.loads(about["history"])) == (["linvel"], 3)
    assert json.loads(about["state"])["history"] == [2, 82]
    capsys.readouterr()

    session = Session(env, lambda obs, key: agent.act(state, obs[None])[0])
    session.control({"command": [0.5, 0.0, 0.0]})
    for _ in range(3):
        session.advance()
    assert session.steps == 3
    named = session.state()["observation"]
    assert named["command"] == named["command-1"] == [0.5, 0.0, 0.0]
    assert named["gyro"] != named["gyro-1"]


@pytest.mark.parametrize("history", ["0", "-1"])
def test_no_history_is_refused(history, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", "--env", "Pendulum", "--history", history, "--run-dir", str(run)]
    assert main(words) == 2
    assert f"history={history} is below 1" in capsys.readouterr().err
    assert not run.exists()
