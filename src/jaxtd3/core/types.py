"""The values that flow through the program, and the shapes of the parts that make it.

    env.step -> Transition[E] -> replay.add -> replay.sample -> Batch[B] -> agent.update
       ^                                                                        |
       +------- action[E] <- noise <- agent.act <---------- AgentState <--------+

Axes in comments: `E` environments, `T` ring length, `B` batch, `D` observation, `U` action,
`K` reward terms. An observation is one flat vector `[actor part | privileged part]`: the actor
reads the head, the critic all of it (or only the tail, see `EnvSpec.critic_sees_obs`), and ring,
statistics and terminal observations need no second array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import struct

Array = jax.Array
Metrics = dict[str, Array]


@dataclass(frozen=True)
class EnvSpec:
    """What the learner needs to know about an environment, known before anything is allocated."""

    name: str
    obs_size: int
    """Width of what the actor sees."""
    action_size: int
    episode_length: int
    """Steps until the time limit truncates an episode."""
    extra_size: int = 0
    """Width of the privileged part, seen by the critic alone."""
    dt: float = 1.0
    """Seconds of simulated time per step."""
    reward_terms: tuple[str, ...] = ()
    """Names of the terms whose weighted sum is the reward; empty where it is not such a sum."""
    default_weights: tuple[float, ...] = ()
    """The environment's own weight for each term."""
    reward_scale: float = 1.0
    """reward = clip(reward_scale * sum(weights * terms), *reward_clip)."""
    reward_clip: tuple[float, float] | None = None
    critic_sees_obs: bool = True
    """True: the critic reads all of the vector (privileged state begins with the actor's
    observation, or there is none); False: only the privileged tail."""
    order: tuple[int, ...] = ()
    """Where each number of one observation stands in the environment's own; empty: there and here
    alike (`envs/hidden.py` moves some)."""
    history: int = 1
    """Observations, oldest first, that the actor sees at once: `obs_size` is that of all of them
    (`envs/history.py`)."""

    @property
    def width(self) -> int:
        """Width `D` of the flat observation vector."""
        return self.obs_size + self.extra_size

    @property
    def frame_size(self) -> int:
        """Width of one observation of the actor."""
        return self.obs_size // self.history

    @property
    def frame_width(self) -> int:
        """Width of one observation with its privileged part: what is stored and counted."""
        return self.frame_size + self.extra_size

    @property
    def critic_size(self) -> int:
        return self.width if self.critic_sees_obs else self.extra_size

    def combine(self, terms: Array, weights: Array) -> Array:
        """clip(scale * sum_k weights_k * terms_k): [..]."""
        reward = self.reward_scale * jax.numpy.matmul(terms, weights, precision="highest")
        return reward if self.reward_clip is None else jax.numpy.clip(reward, *self.reward_clip)

    def actor_obs(self, x: Array) -> Array:
        """The actor's part of flat observations (or of statistics over them): [.., obs]."""
        return x[..., : self.obs_size]

    def newest(self, x: Array) -> Array:
        """The newest observation with its privileged part of flat observations: [.., frame]."""
        return x if self.history == 1 else x[..., self.obs_size - self.frame_size :]

    def repeated(self, x: Array) -> Array:
        """Statistics of one observation as those of a flat vector: [frame] -> [D]."""
        if self.history == 1:
            return x
        frame, extra = x[: self.frame_size], x[self.frame_size :]
        return jax.numpy.concatenate([frame] * self.history + [extra])

    def critic_obs(self, x: Array) -> Array:
        """The critic's part of flat observations: [.., critic]."""
        return x if self.critic_sees_obs else x[..., self.obs_size :]


class EnvStep(NamedTuple):
    """What one step of one environment returns."""

    state: Any
    obs: Array  # [D]
    reward: Array  # [] the environment's own reward
    terms: Array  # [K] unweighted reward terms
    terminated: Array  # [] bool


class Env(Protocol):
    """ONE environment as pure functions; `batch_env` makes the training environment of it.

    An optional method `rekey(state, key) -> state` gives a copied state random numbers of its own.

    Filming, play and export ask for more, all of it optional (`MujocoTask` has it):

        mj_model              the MuJoCo model; then a state `x` has `x.state.data`, an `mjx.Data`
                              with qpos and qvel, and `x.state.info`, a dict, where `command [C]`
                              is what the policy is asked to do, if anything
        command_ranges        least and largest value of each part of the command
        layout                `Part(name, start, stop)` of every part of the observation
        default_pose          the controls that an action of 0 stands for [U]
        action_scale, bounds  what an action of 1 adds to them
        draw(state)           a picture [H, W, 3], where there is no MuJoCo model
        metrics, preset       its own metrics, and settings that suit it
        from_config(cfg, n)   of the class: makes it under an `EnvConfig`, for n devices
    """

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, key: Array) -> tuple[Any, Array]:
        """A fresh (state, obs [D])."""
        ...

    def step(self, state: Any, action: Array) -> EnvStep: ...


class Transition(NamedTuple):
    """One step of every environment; `final_obs` is the observation before any reset."""

    obs: Array  # [E, D]
    action: Array  # [E, U] what the environment received
    reward: Array  # [E] under the weights of the run
    terms: Array  # [E, K]
    terminated: Array  # [E] bool
    truncated: Array  # [E] bool
    final_obs: Array  # [E, D]
    valid: Array  # [E] bool; False: a non-finite step, quarantined

    @property
    def done(self) -> Array:
        """True where the next observation belongs to another episode."""
        return self.terminated | self.truncated | ~self.valid


class Batch(NamedTuple):
    """What the learner sees: `target = reward + discount * value(next_obs)`."""

    obs: Array  # [B, D]
    action: Array  # [B, U]
    reward: Array  # [B] sum of gamma^j r_j over the window
    discount: Array  # [B] gamma^k, 0 where the window ends the episode
    next_obs: Array  # [B, D]
    weight: Array  # [B] weight in the loss, 0 for quarantined steps
    index: Any = None  # where in the ring they are, for a replay that asks the learner about them


class EnvState(struct.PyTreeNode):
    """All environments of one device, and the pool of fresh states that ended ones take."""

    inner: Any  # [E, ...]
    obs: Array  # [E, D]
    steps: Array  # [E] int32, steps since reset
    returns: Array  # [E] reward summed since reset
    pool: Any  # [P, ...]
    pool_obs: Array  # [P, D]
    cursor: Array  # [1] int32, next pool entry to use; one per device


class BatchEnv(NamedTuple):
    """A batch of environments with time limit, auto-reset and NaN quarantine."""

    spec: EnvSpec
    env: Env
    num_envs: int
    init: Callable[[Array], EnvState]
    """init(key) -> EnvState"""
    step: Callable[..., tuple[EnvState, Transition, Metrics]]
    """step(state, action [E, U], key, weights=None) -> (state, transition, metrics), rewarded under
    `weights [K]`; None: those of the config"""
    refresh: Callable[[EnvState, Array], EnvState]
    """refresh(state, key) -> state with a new reset pool; call it now and then, outside the scan"""
    weights: Array
    """Reward weights of the config [K]"""
    single: Any
    """Shapes of ONE environment's state: a leaf of a batch has an axis E where it has one more"""


class TrainState(struct.PyTreeNode):
    """All that a run is: whoever has this can resume it."""

    agent: Any
    replay: Any
    env: EnvState
    noise: Any
    discounted: Array  # [E] running discounted return, for reward normalisation
    weights: Array  # [K] reward weights of the run, traced; a schedule may change those of now
    key: Array
    iteration: Array  # [] int32


class Health(NamedTuple):
    """What an agent says of updates that it refused because they were not finite."""

    skipped: Any  # [] so many so far
    streak: Any  # [N] how many in a row, of each network
    fault: Any  # [] index of what the first of them failed by, -1: of nothing


HEALTHY = Health(np.int32(0), np.zeros(1, np.int32), np.int32(-1))


class Agent(NamedTuple):
    """An algorithm as a value: pure functions (compare `optax.GradientTransformation`)."""

    init: Callable[[Array], Any]
    """init(key) -> AgentState"""
    act: Callable[[Any, Array], Array]
    """act(agent_state, obs [.., D]) -> action [.., U], deterministic"""
    observe: Callable[[Any, Transition, Array], Any]
    """observe(agent_state, transition, discounted_return [E]) -> agent_state, statistics updated"""
    update: Callable[..., tuple[Any, Metrics, Array | None]]
    """update(agent_state, batch, key, policy=bool) -> (agent_state, metrics, |TD error| [B] or
    None); the last tells the replay what surprised the learner"""
    discount: Callable[[Any], Array]
    """discount(agent_state) -> gamma []"""
    td_error: Callable[[Any, Batch, Array], Array] | None = None
    """td_error(agent_state, batch, key) -> |TD error| [B], of what was just collected"""
    health: Callable[[Any], Health] = lambda state: HEALTHY
    """health(agent_state) -> what was refused so far"""


class Replay(NamedTuple):
    """A buffer as a value."""

    init: Callable[[int], Any]
    """init(num_envs) -> ReplayState"""
    add: Callable[[Any, Transition], Any]
    """add(replay_state, transition) -> replay_state"""
    sample: Callable[..., Batch]
    """sample(replay_state, key, gamma, weights=None) -> Batch; a replay that keeps reward terms
    rewards them under `weights [K]`, None: the environment's own"""
    update_priority: Callable[[Any, Batch, Array], Any] | None = None
    """update_priority(replay_state, batch, td_error [B]) -> replay_state; None: all are equal"""
    fresh: Callable[..., Batch] | None = None
    """fresh(replay_state, gamma, weights=None) -> what the last `add` made available [E]"""


class Noise(NamedTuple):
    """Exploration as a value."""

    init: Callable[[Array, int, int], Any]
    """init(key, num_envs, action_size) -> noise_state"""
    apply: Callable[[Any, Array, Array], Array]
    """apply(noise_state, action [E, U], key) -> noisy action, clipped to [-1, 1]"""
    resample: Callable[[Any, Array, Array], Any]
    """resample(noise_state, done [E], key) -> noise_state, once after every step"""
