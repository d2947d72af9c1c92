"""Episodes of a controller in many worlds at once: C MuJoCo, NumPy and onnxruntime, no JAX.

    evaluate_worlds(controller, model, WORLDS, episodes=16)  ->  one Verdict per world
    summarize(verdicts, episodes, seconds)                ->  what is told of a policy, as JSON

Every simulation is one episode in one world. Episode i has the same start, command and gait in
every world, so that worlds are compared fairly. Starts, commands and falls are the environment's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mujoco
import numpy as np
from mujoco import batch as mujoco_batch

from jaxtd3.deploy.robot import fallen, find_places, read_sensors
from jaxtd3.deploy.runtime import Controller
from jaxtd3.deploy.worlds import WORLDS, World, change_model, down_in
from jaxtd3.envs.physics.native import WARNINGS, prepare_model, share_of_cores

ZERO_COMMANDS = 0.1
"""Share of episodes that are told to stand, as in the environment."""
NOISE = {
    "linvel": "linvel",
    "gyro": "gyro",
    "gravity": "gravity",
    "joint_positions": "joint_pos",
    "joint_velocities": "joint_vel",
}
"""Inputs -> names of their noise in the metadata."""


class Verdict(NamedTuple):
    """How a controller fared in one world."""

    world: str
    survival: float  # share of episodes without a fall
    seconds: float  # mean length of an episode
    error_lin: float  # m/s; a robot that fell counts as lying still until the end
    error_ang: float  # rad/s
    error_still: float  # of lying still all the time, both parts together

    @property
    def error(self) -> float:
        return self.error_lin + self.error_ang

    @property
    def score(self) -> float:
        """Survival less the tracking error in units of lying still: 1 for a perfect walker, 0 for
        who only stands, -1 for who falls at once."""
        return self.survival - self.error / (self.error_still or 1.0)


def summarize(verdicts: Sequence[Verdict], episodes: int, seconds: float) -> dict[str, Any]:
    """What a controller's metadata tells: means over the worlds, and the worst of them."""
    worst = min(verdicts, key=lambda v: (v.survival, -v.error))
    mean = lambda name: round(sum(getattr(v, name) for v in verdicts) / len(verdicts), 4)  # noqa: E731
    return {
        "survival": mean("survival"),
        "tracking_error": mean("error"),
        "score": mean("score"),
        "worst_world": worst.world,
        "worst_survival": round(worst.survival, 4),
        "by_world": {v.world: [round(v.survival, 4), round(v.error, 4)] for v in verdicts},
        "episodes": episodes,
        "seconds": seconds,
    }


class Starts(NamedTuple):
    """First states and tasks of episodes."""

    qpos: np.ndarray  # [E, nq]
    qvel: np.ndarray  # [E, nv]
    command: np.ndarray  # [E, 3]
    frequency: np.ndarray  # [E, 1] of the gait, Hz


def evaluate_worlds(
    controller: Controller,
    model: mujoco.MjModel,
    worlds: Sequence[World] = WORLDS,
    episodes: int = 16,
    seconds: float = 10.0,
    seed: int = 0,
    threads: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[Verdict]:
    """Run `episodes` in every world, all at once; `progress` hears the share that is done."""
    about = controller.about
    steps = max(1, round(seconds / about["dt"]))
    starts = sample_starts(about, model, episodes, seed)
    tiled = Starts(*(np.tile(x, (len(worlds), 1)) for x in starts))
    each = [world for world in worlds for _ in range(episodes)]  # [N]
    group = Episodes(controller, prepare_model(model), each, tiled, seed, threads)
    for i in range(steps):
        with np.errstate(over="ignore", invalid="ignore"):  # a robot that blew up has fallen
            group.step()
        if progress is not None:
            progress((i + 1) / steps)
        if not group.alive.any():
            break
    return [
        group.verdict(world, slice(k * episodes, (k + 1) * episodes), steps)
        for k, world in enumerate(worlds)
    ]


def sample_starts(about: Any, model: mujoco.MjModel, episodes: int, seed: int) -> Starts:
    """Starts as the environment draws them; an episode's does not depend on how many there are."""
    home = model.key(about["keyframe"]).qpos
    low, high = (np.asarray(about["command"][k]) for k in ("low", "high"))
    gait, found = about["gait"], []
    for i in range(episodes):
        rng = np.random.default_rng([seed, i])
        qpos, qvel = home.copy(), np.zeros(model.nv)
        qpos[:2] += rng.uniform(-0.5, 0.5, 2)
        yaw = rng.uniform(-math.pi, math.pi)
        turn = np.array([math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)])
        mujoco.mju_mulQuat(qpos[3:7], home[3:7], turn)
        qpos[7:] *= rng.uniform(0.5, 1.5, model.nq - 7)
        qvel[:6] = rng.uniform(-0.5, 0.5, 6)
        stands = rng.uniform() < ZERO_COMMANDS
        command = np.zeros(3) if stands else rng.uniform(low, high)
        frequency = rng.uniform(gait["frequency_low"], gait["frequency_high"], 1)
        found.append((qpos, qvel, command, frequency))
    return Starts(*(np.stack(column) for column in zip(*found, strict=True)))


class Episodes:
    """N simulations, each an episode in its world, stepped together by one controller."""

    def __init__(
        self,
        controller: Controller,
        model: mujoco.MjModel,
        worlds: Sequence[World],
        starts: Starts,
        seed: int,
        threads: int = 0,
    ):
        self.controller, self.about = controller, controller.about
        self.places, self.starts = find_places(self.about, model), starts
        count, self.count_steps = len(worlds), 0
        self.batch = mujoco_batch.Batch(model, count, threads or share_of_cores())
        change_model(self.batch, model, worlds)
        self.data = Fields(self.batch)
        self.down = down_in(worlds)
        self.data.qpos[:], self.data.qvel[:] = starts.qpos, starts.qvel
        self.data.ctrl[:] = starts.qpos[:, 7:]
        self.batch.forward()
        self.alive = np.ones(count, bool)
        self.lengths = np.zeros(count)
        self.errors = np.zeros((count, 2))
        self.state = controller.start(count)
        self.rng = np.random.default_rng([seed, 1 << 20])
        self._set_delays(worlds, model)
        self.noise = np.array([[world.noise] for world in worlds])
        every = [world.push_every / self.about["dt"] for world in worlds]
        self.push_every = np.maximum(1, np.round(every).astype(int))
        self.push = np.array([world.push for world in worlds])

    def _set_delays(self, worlds: Sequence[World], model: mujoco.MjModel) -> None:
        """A delay is some whole control steps and some physics steps."""
        dt = model.opt.timestep
        self.substeps = round(self.about["dt"] / dt)
        delays = np.array([round(world.delay / dt) for world in worlds])
        self.late_steps, self.late_substeps = np.divmod(delays, self.substeps)
        depth = int(self.late_steps.max()) + 2
        self.sent = [self.data.ctrl.copy() for _ in range(depth)]  # newest first

    # --- a step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Observe, act, let the delayed targets reach the motors, and count."""
        sensors = read_sensors(self.places, self.data, self.down)
        inputs = {name: self._noisy(name, x) for name, x in sensors.items()}
        inputs["command"] = self.starts.command.astype(np.float32)
        inputs["gait_frequency"] = self.starts.frequency.astype(np.float32)
        out, self.state = self.controller.step(inputs, self.state)
        self.sent = [np.asarray(out["joint_targets"], float), *self.sent[:-1]]
        self._push()
        ids = np.flatnonzero(self.alive)
        self._physics(ids)
        self.count_steps += 1
        self._count()

    def _noisy(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = self.about["noise"][NOISE[name]]
        return (x + self.noise * scale * self.rng.uniform(-1, 1, x.shape)).astype(np.float32)

    def _push(self) -> None:
        due = (self.count_steps > 0) & (self.count_steps % self.push_every == 0)
        angle = self.rng.uniform(0, 2 * math.pi, len(self.push))
        way = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        self.data.qvel[:, :2] += (due * self.push)[:, None] * way

    def _physics(self, ids: np.ndarray) -> None:
        """One control step of the simulations `ids`, targets changing when each one's arrive."""
        sent, every = np.stack(self.sent), np.arange(len(self.alive))
        cuts = sorted({0, self.substeps, *self.late_substeps[ids].tolist()})
        self.batch.warning[:] = 0
        for begin, end in itertools.pairwise(cuts):
            age = self.late_steps + (begin < self.late_substeps)
            self.data.ctrl[:] = sent[age, every]
            try:
                self.batch.step(ids=ids, nstep=end - begin)
            except mujoco_batch.SimulationError as error:
                self.data.qpos[np.asarray(error.ids)] = np.nan

    def _count(self) -> None:
        bad = self.batch.warning[:, WARNINGS].any(axis=(1, 2))
        down = fallen(self.places, self.data, self.down) | bad
        error = tracking_error(self.data, self.starts.command)  # [N, 2]
        over, goes_on = self.alive & down, self.alive & ~down
        self.errors[goes_on] += error[goes_on]
        self.lengths[self.alive] += 1
        self.alive = goes_on
        if over.any():  # so that nothing wild is computed any more
            self.data.qpos[over], self.data.qvel[over] = self.starts.qpos[over], 0.0

    def verdict(self, world: World, part: slice, steps: int) -> Verdict:
        """Means over a world's episodes; who fell lies still until the end."""
        command = self.starts.command[part]
        still = np.stack([np.linalg.norm(command[:, :2], axis=1), np.abs(command[:, 2])], axis=1)
        upright = self.lengths[part] - ~self.alive[part]
        errors = (self.errors[part] + (steps - upright)[:, None] * still) / steps
        length = self.lengths[part].mean() * self.about["dt"]
        means = (self.alive[part].mean(), length, *errors.mean(axis=0), still.sum(axis=1).mean())
        return Verdict(world.name, *(float(x) for x in means))


class Fields:
    """Live arrays of a batch, by the names of `MjData`."""

    def __init__(self, batch: Any):
        self.qpos, self.qvel, self.ctrl = (batch.bind(n) for n in ("qpos", "qvel", "ctrl"))
        self.sensordata, self.site_xmat = batch.bind("sensordata"), batch.bind("site_xmat")


def tracking_error(data: Any, command: np.ndarray) -> np.ndarray:
    """|command - velocity| over ground and in turning, in the base's frame: [N, 2]."""
    w, u, v = data.qpos[:, 3:4], -data.qpos[:, 4:7], data.qvel[:, :3]
    real = v + 2 * np.cross(u, np.cross(u, v) + w * v)
    lin = np.linalg.norm(command[:, :2] - real[:, :2], axis=1)
    return np.stack([lin, np.abs(command[:, 2] - data.qvel[:, 5])], axis=1)
