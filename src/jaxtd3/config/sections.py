"""The settings of a run, section by section. A field says once what it is:

    traced    a number inside the compiled program: members of a population may differ in it
    symbol    the name of that number in its section's NamedTuple (default: the field's own); a
              field that has one is a number of the program even where it is kept
    kept      a resumed run cannot change it: it shapes the state, or decides what it means
    derived   None until the program is built: then as many of these as the whole run has

Nothing here imports JAX, so that `--help` and a misspelt flag answer at once.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import namedtuple
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtd3.errors import nearest

FOREVER = 1e30
"""Steps or updates of a schedule without a length: it stays where it begins."""


def about(
    help: str, traced: bool = False, kept: bool = False, derived: str = "", symbol: str = ""
) -> dict[str, Any]:
    """What is known of a field beside its type and default."""
    return {"help": help, "traced": traced, "kept": kept, "derived": derived, "symbol": symbol}


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field with its help text, and what else `about` knows."""
    return field(default=default, metadata=about(help, **more))


def table_names(module: str, table: str, *known: str) -> Collection[str]:
    """`known`, and what else is in a table of parts; who added to it has imported it already."""
    loaded = getattr(sys.modules.get(module), table, ())
    return tuple(dict.fromkeys((*known, *loaded)))


# The parts that the package has (a test compares them with the tables themselves).
CRITICS = ("c51", "scalar", "quantile")
COMBINES = ("lower-mean", "elementwise-min")
NETWORKS = ("mlp", "simnorm", "simbav2")
ACTIVATIONS = ("relu", "elu", "silu")
LADDERS = ("mixed", "constant", "linear", "geometric")


def check_choices(section: Any, choices: Mapping[str, Collection[str]]) -> None:
    """Refuse a name that is not among the choices of its field."""
    for name, known in choices.items():
        if getattr(section, name) not in known:
            raise ValueError(nearest(name, getattr(section, name), known))


@dataclass(frozen=True)
class RunConfig:
    """How long, and what is kept."""

    seed: int = setting(0, "Seed of every random number of the run.", traced=True, kept=True)
    iterations: int = setting(
        100_000,
        "Iterations to train: collect_steps of every environment and the updates that follow.",
    )
    max_time: float | None = setting(
        None,
        "Stop after so many seconds of training (compile time not counted).",
    )
    log_every: int = setting(100, "Iterations per compiled chunk, and per line of metrics.")
    eval_every: int = setting(5000, "Iterations between evaluations (0: only at the end).")
    eval_episodes: int = setting(128, "Episodes per evaluation.")
    checkpoint_every: int = setting(10_000, "Iterations between checkpoints (0: only at the end).")
    keep: int = setting(2, "Checkpoints kept beside the best one.")
    best: str = setting(
        "return",
        "What the best checkpoint is best at: return, or robust (G1 and T1: staying up and "
        "following the command in sixteen worlds, tried in C MuJoCo at every evaluation).",
        kept=True,
    )
    devices: int = setting(0, "Devices to use (0: all).")

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative")
        for name, least in (
            ("iterations", 1),
            ("log_every", 1),
            ("eval_every", 0),
            ("eval_episodes", 1),
            ("checkpoint_every", 0),
            ("keep", 2),
            ("devices", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}")
        if self.max_time is not None and not 0 < self.max_time < math.inf:
            raise ValueError(f"max_time={self.max_time} is not a positive number of seconds")
        check_choices(self, {"best": ("return", "robust")})


@dataclass(frozen=True)
class EnvConfig:
    """The environment."""

    name: str = setting(
        "G1JoystickFlatTerrain",
        "Environment: any of Playground's, one you registered, or file.py:Class.",
        kept=True,
    )
    num_envs: int = setting(1024, "Environments stepped together, over all devices.", kept=True)
    episode_length: int | None = setting(
        None,
        "Steps until a training episode is cut off and bootstrapped through (default: the "
        "environment's own, which evaluation always runs).",
        kept=True,
    )
    impl: Literal["auto", "native", "jax", "warp"] = setting(
        "auto",
        "Physics back end; auto: warp on an NVIDIA GPU, native (MuJoCo's C engine) on a CPU, jax "
        "(MJX as JAX operations) elsewhere.",
        kept=True,
    )
    physics_threads: int = setting(
        0,
        "Threads that step native physics on each device (0: the cores shared out); no bit "
        "depends on it.",
    )
    reset: Literal["pool", "step", "cached"] = setting(
        "pool",
        "pool: refilled between chunks; step: also refilled by num_envs/16 states every step; "
        "cached: every environment returns to its own first state for ever (Playground's way).",
    )
    randomize: bool = setting(
        False,
        "Randomise the robot's dynamics at every reset, where Playground knows how.",
        kept=True,
    )
    push: bool = setting(False, "Push the robot now and then, where the environment knows how.")
    action_delay: float = setting(
        0.0,
        "Largest delay of actions on their way to the motors, in seconds: drawn for every episode "
        "of training (Playground's environments).",
        kept=True,
    )
    sim_dt: float | None = setting(
        None,
        "Seconds of one physics step in training (default: the environment's own, which "
        "evaluation always runs). Coarser physics is that much faster.",
    )
    action_bounds: Literal["scale", "limits"] = setting(
        "scale",
        "What actions of -1 and 1 stand for: scale (the environment's action_scale from the "
        "default pose, the same for all joints) or limits (the limits of each joint).",
        kept=True,
    )
    actor_hides: str = setting(
        "",
        "Parts of the observation that the actor shall not see, by name, as linvel,gravity; the "
        "critic still does. `jaxtd3 envs --env NAME` lists them.",
        kept=True,
    )
    history: int = setting(
        1,
        "Observations that the actor sees at once: its last ones, the first repeated at an "
        "episode's start. Replay stores each once.",
        kept=True,
    )
    stagger: bool = setting(
        False,
        "Start the first episodes at random ages, so that time limits do not fall together.",
    )
    weights: Mapping[str, float] = field(
        default_factory=dict,
        metadata=about("Reward weights that differ from the environment's own.", traced=True),
    )
    source_sha256: str = setting("", "Digest of the file that file.py:Class was read from.")

    def __post_init__(self):
        if self.num_envs < 1:
            raise ValueError(f"num_envs={self.num_envs} is below 1")
        if self.history < 1:
            raise ValueError(f"history={self.history} is below 1")
        if self.physics_threads < 0:
            raise ValueError(f"physics_threads={self.physics_threads} is negative")
        if self.episode_length is not None and self.episode_length < 1:
            raise ValueError(f"episode_length={self.episode_length} is below 1")
        if not 0 <= self.action_delay <= 1:
            raise ValueError(f"action_delay={self.action_delay} is not between 0 and 1 s")
        if self.sim_dt is not None and not self.sim_dt > 0:
            raise ValueError(f"sim_dt={self.sim_dt} is not above 0")
        check_choices(
            self,
            {
                "impl": ("auto", "native", "jax", "warp"),
                "reset": ("pool", "step", "cached"),
                "action_bounds": ("scale", "limits"),
            },
        )


@dataclass(frozen=True)
class AgentConfig:
    """The learner."""

    gamma: float = setting(0.97, "Discount per step.", traced=True)
    v_min: float = setting(-10.0, "Lowest atom of the value distribution.", traced=True)
    v_max: float = setting(10.0, "Highest atom of the value distribution.", traced=True)
    num_atoms: int = setting(101, "Atoms of the value distribution, or quantiles.", kept=True)
    tau: float = setting(0.1, "Polyak rate of the target critics, per critic update.", traced=True)
    actor_lr: float = setting(3e-4, "Learning rate of the actor at the start.", traced=True)
    actor_lr_end: float = setting(
        3e-4,
        "Learning rate of the actor at the end (cosine).",
        traced=True,
    )
    critic_lr: float = setting(3e-4, "Learning rate of the critics at the start.", traced=True)
    critic_lr_end: float = setting(
        3e-4,
        "Learning rate of the critics at the end (cosine).",
        traced=True,
    )
    schedule_updates: int | None = setting(
        None,
        "Critic updates over which the learning rates go from start to end (default: the whole "
        "run).",
        traced=True,
        derived="critic_updates",
    )
    weight_decay: float = setting(0.1, "AdamW weight decay, on every parameter.", traced=True)
    policy_noise: float = setting(
        0.001,
        "Standard deviation of the noise on the target action.",
        traced=True,
    )
    noise_clip: float = setting(0.5, "Bound of the noise on the target action.", traced=True)
    critic: str = setting(
        "c51",
        "What critics learn: c51 (distribution over atoms), scalar (squared error) or quantile.",
        kept=True,
    )
    cdq: bool = setting(
        True,
        "Clipped double Q: all critics learn the lower target (off: each its own).",
    )
    cdq_target: str = setting(
        "lower-mean",
        "The lower target: lower-mean (that of the lower mean) or elementwise-min (PQL-D).",
    )
    target_actor: bool = setting(
        False,
        "Targets follow a policy that lags behind by tau (off: the policy itself).",
        kept=True,
    )
    network: str = setting("mlp", "Kind of networks: mlp, simnorm or simbav2.", kept=True)
    activation: str = setting(
        "relu",
        "Of the mlp and simnorm networks: relu, elu or silu.",
        kept=True,
    )
    layer_norm: bool = setting(
        False,
        "LayerNorm before every activation of the mlp and simnorm networks.",
        kept=True,
    )
    simnorm_in: str = setting(
        "both",
        "Where the third hidden layer is a SimNorm: actor, critic or both.",
        kept=True,
    )
    simnorm_groups: int = setting(8, "Groups of a SimNorm.", kept=True)
    simnorm_dim: int = setting(64, "Units within each group of a SimNorm.", kept=True)
    actor_blocks: int = setting(1, "Residual blocks of a SimbaV2 actor.", kept=True)
    critic_blocks: int = setting(2, "Residual blocks of a SimbaV2 critic.", kept=True)
    reproject: bool = setting(
        False,
        "Bring SimbaV2's weights back to the unit sphere after every step, as its authors do.",
    )
    actor_hidden: int = setting(
        512,
        "Width of the actor's first layer; the next two are 1/2 and 1/4 of it.",
        kept=True,
    )
    critic_hidden: int = setting(
        1024,
        "Width of the critics' first layer; the next two are 1/2 and 1/4 of it.",
        kept=True,
    )
    num_critics: int = setting(2, "Critics in the ensemble.", kept=True)
    max_grad_norm: float = setting(0.0, "Clip gradients to this global norm (0: off).")
    normalize_obs: bool = setting(
        True,
        "Normalise observations by running statistics of collected data.",
        kept=True,
    )
    normalize_reward: bool = setting(
        False,
        "Divide rewards by the spread of the running discounted return.",
        kept=True,
    )
    compute: str = setting(
        "f32",
        "Precision of the networks' matrix products: f32, bf16, or auto (bf16 on a GPU and on a "
        "CPU that has bf16 units); parameters and losses stay f32.",
    )
    max_bad_updates: int = setting(
        100,
        "Stop the run when so many updates in a row were not finite (each is skipped).",
    )

    def __post_init__(self):
        if not self.v_min < self.v_max:
            raise ValueError(f"v_min={self.v_min} is not below v_max={self.v_max}")
        checks = {
            "gamma": 0 <= self.gamma <= 1,
            "tau": 0 < self.tau <= 1,
            "num_atoms": self.num_atoms >= 2,
            "num_critics": self.num_critics >= 1,
            "actor_lr": self.actor_lr > 0,
            "critic_lr": self.critic_lr > 0,
            "actor_lr_end": self.actor_lr_end >= 0,
            "critic_lr_end": self.critic_lr_end >= 0,
            "schedule_updates": self.schedule_updates is None or self.schedule_updates >= 1,
            "weight_decay": self.weight_decay >= 0,
            "policy_noise": self.policy_noise >= 0,
            "noise_clip": self.noise_clip >= 0,
            "max_grad_norm": self.max_grad_norm >= 0,
            "actor_hidden": self.actor_hidden >= 4,
            "critic_hidden": self.critic_hidden >= 4,
            "simnorm_groups": self.simnorm_groups >= 1,
            "simnorm_dim": self.simnorm_dim >= 2,
            "actor_blocks": self.actor_blocks >= 1,
            "critic_blocks": self.critic_blocks >= 1,
            "max_bad_updates": self.max_bad_updates >= 1,
        }
        for name, ok in checks.items():
            if not ok:
                raise ValueError(f"agent {name}={getattr(self, name)} is out of range")
        check_choices(
            self,
            {
                "compute": ("auto", "f32", "bf16"),
                "critic": table_names("jaxtd3.agent.critics", "CRITICS", *CRITICS),
                "cdq_target": COMBINES,
                "network": table_names("jaxtd3.nets.mlp", "NETWORKS", *NETWORKS),
                "activation": table_names("jaxtd3.nets.mlp", "ACTIVATIONS", *ACTIVATIONS),
                "simnorm_in": ("actor", "critic", "both"),
            },
        )


@dataclass(frozen=True)
class ReplayConfig:
    """What is kept, and what is drawn from it."""

    length: int = setting(
        1024,
        "Steps kept per environment; capacity is length * num_envs transitions.",
        kept=True,
    )
    batch_size: int = setting(32768, "Transitions per update, over all devices.")
    n_step: int = setting(1, "Length of the reward window in front of the bootstrap.")
    bf16: bool = setting(
        False,
        "Store observations and actions in bfloat16: half the memory.",
        kept=True,
    )
    bootstrap_truncated: bool = setting(
        True,
        "Bootstrap through the time limit (off: FastTD3's disable_bootstrap).",
    )
    store_next_obs: bool = setting(
        False,
        "Keep every next observation too, for environments whose next step does not begin with it.",
        kept=True,
    )
    store_terms: bool = setting(
        False,
        "Keep the raw reward terms instead of the reward, so that a change of reward weights "
        "counts for all past data.",
        kept=True,
    )
    symmetry: str = setting(
        "off",
        "Left-right symmetry of the robot (G1 and T1): off, augment (every example is mirrored "
        "or not, by the toss of a coin) or double (every example and its mirror image).",
    )
    prioritized: bool = setting(
        False,
        "Draw by priority (Ape-X): what surprised the learner comes more often.",
        kept=True,
    )
    priority_alpha: float = setting(0.6, "Priority = |TD error|^alpha.", kept=True, symbol="alpha")
    priority_beta: float = setting(
        0.4,
        "Importance weights are (n P)^-beta: 1 undoes the preference for surprises.",
        traced=True,
        symbol="beta",
    )
    priority_beta_end: float = setting(
        1.0, "Beta at the end of its linear schedule.", traced=True, symbol="beta_end"
    )
    priority_steps: int | None = setting(
        None,
        "Environment steps over which beta goes from start to end (default: the whole run).",
        traced=True,
        symbol="steps",
        derived="collect_steps",
    )
    priority_new: str = setting(
        "td",
        "Priority of new data: td (|TD error|, computed as they are collected) or max.",
    )

    def __post_init__(self):
        for name, least in (("length", 2), ("batch_size", 1), ("n_step", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"replay {name}={getattr(self, name)} is below {least}")
        if self.n_step >= self.length:
            raise ValueError(f"n_step={self.n_step} does not fit a ring of length={self.length}")
        for name in ("priority_alpha", "priority_beta", "priority_beta_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not between 0 and 1")
        if self.priority_steps is not None and self.priority_steps < 1:
            raise ValueError(f"priority_steps={self.priority_steps} is below 1")
        check_choices(
            self, {"priority_new": ("td", "max"), "symmetry": ("off", "augment", "double")}
        )
        if self.symmetry == "double" and self.prioritized:
            raise ValueError("symmetry=double does not go with prioritized: use augment")


@dataclass(frozen=True)
class LoopConfig:
    """How collecting and learning alternate."""

    collect_steps: int = setting(1, "Environment steps per iteration.")
    critic_updates: int = setting(2, "Critic updates per iteration.")
    policy_updates: int = setting(
        1,
        "Policy updates per iteration, spread evenly over the critic updates.",
    )
    warmup: int = setting(10, "Iterations of collecting before learning begins.")
    sync_every: int = setting(
        1,
        "Updates between two averagings over devices (1: of gradients, at every update; more: "
        "each device learns alone in between, as Gorila's bundles do).",
    )
    warmup_random: bool = setting(
        False,
        "Uniform actions during warm-up, instead of the untrained policy with noise.",
        kept=True,
    )
    noise: str = setting(
        "mixed",
        "How sigma differs between environments: mixed (drawn per episode), constant (sigma_max"
        " everywhere), linear (sigma_min ... sigma_max, as PQL), geometric (powers of "
        "sigma_max, as Ape-X).",
        kept=True,
    )
    sigma_min: float = setting(0.001, "Lowest exploration noise.", traced=True)
    sigma_max: float = setting(0.4, "Highest exploration noise.", traced=True)
    noise_alpha: float = setting(
        7.0, "Steepness of the geometric ladder.", traced=True, symbol="alpha"
    )
    noise_decay: float = setting(
        1.0,
        "Share of the exploration noise that is left at the end (1: no decay).",
        traced=True,
        symbol="decay",
    )
    noise_steps: int | None = setting(
        None,
        "Environment steps over which the noise decays, linearly (default: the whole run).",
        traced=True,
        symbol="steps",
        derived="collect_steps",
    )
    noise_correlation: float = setting(
        0.0,
        "Correlation of exploration noise from step to step (0: white; 1: held for the episode).",
        kept=True,
        symbol="correlation",
    )
    noise_hold: int = setting(
        0,
        "Hold exploration noise for a random number of steps, at most so many, k steps with "
        "probability proportional to 1 / k^2 (0: off).",
        kept=True,
    )
    sigma_white: float = setting(
        0.0, "White noise beside the correlated noise.", traced=True, symbol="white"
    )
    curriculum: int = setting(
        0,
        "Iterations over which reward terms of negative weight grow from nothing to their full "
        "weight (0: full from the start).",
    )
    curriculum_weights: Mapping[str, float] = field(
        default_factory=dict,
        metadata=about(
            "Reward weights for the first half of the `curriculum` iterations; in the second half "
            "they move to those of the run. Penalties do not grow then."
        ),
    )
    curriculum_length: bool = setting(
        False,
        "Reward weights follow the length of the episodes: penalties grow from half to their "
        "full weight, the bonus for being alive shrinks to curriculum_alive, as episodes grow "
        "to their time limit. Goes well with store_terms: past data then count under the "
        "weights of now.",
    )
    curriculum_alive: float = setting(
        0.5,
        "Share of the bonus for being alive that is left when episodes last to their time limit.",
    )

    def __post_init__(self):
        k, u, v = self.collect_steps, self.critic_updates, self.policy_updates
        if min(k, u, v) < 1:
            raise ValueError(f"collect_steps={k}, critic_updates={u}, policy_updates={v}: below 1")
        if max(k, u) % min(k, u):
            raise ValueError(f"collect_steps={k} and critic_updates={u}: one must divide the other")
        if u % v:
            raise ValueError(f"critic_updates={u} is not divisible by policy_updates={v}")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} is negative")
        if self.sync_every < 1:
            raise ValueError(f"sync_every={self.sync_every} is below 1")
        if self.curriculum < 0:
            raise ValueError(f"curriculum={self.curriculum} is negative")
        if self.curriculum_weights and not self.curriculum:
            raise ValueError("curriculum_weights needs curriculum, the iterations it takes")
        if self.curriculum and self.curriculum_length and not self.curriculum_weights:
            raise ValueError("curriculum and curriculum_length: only one of them")
        if not 0 <= self.curriculum_alive <= 1:
            raise ValueError(f"curriculum_alive={self.curriculum_alive} is not between 0 and 1")
        check_noise(self)


def check_noise(cfg: LoopConfig) -> None:
    """Refuse exploration settings that make no sense."""
    check_choices(cfg, {"noise": table_names("jaxtd3.agent.exploration", "LADDERS", *LADDERS)})
    if not 0 <= cfg.sigma_min <= cfg.sigma_max:
        raise ValueError(
            f"sigma_min={cfg.sigma_min}, sigma_max={cfg.sigma_max}: not 0 <= min <= max"
        )
    if cfg.noise == "geometric" and cfg.sigma_max >= 1:
        raise ValueError(f"sigma_max={cfg.sigma_max}: a geometric ladder needs less than 1")
    checks = {
        "noise_alpha": cfg.noise_alpha >= 0,
        "noise_decay": cfg.noise_decay >= 0,
        "noise_steps": cfg.noise_steps is None or cfg.noise_steps >= 1,
        "noise_correlation": 0 <= cfg.noise_correlation <= 1,
        "noise_hold": cfg.noise_hold >= 0,
        "sigma_white": cfg.sigma_white >= 0,
    }
    for name, ok in checks.items():
        if not ok:
            raise ValueError(f"{name}={getattr(cfg, name)} is out of range")
    if cfg.noise_hold and cfg.noise_correlation:
        raise ValueError(
            f"noise_hold={cfg.noise_hold} and noise_correlation={cfg.noise_correlation}: "
            "only one of them"
        )


SECTIONS: dict[str, type] = {
    "run": RunConfig,
    "env": EnvConfig,
    "agent": AgentConfig,
    "replay": ReplayConfig,
    "loop": LoopConfig,
}


def fields_with(what: str) -> dict[str, Any]:
    """`section.field` of all fields of which `about` knows this, and what it knows."""
    return {
        f"{section}.{f.name}": f.metadata[what]
        for section, cls in SECTIONS.items()
        for f in dataclasses.fields(cls)
        if f.metadata[what]
    }


def hyper_fields(section: type) -> dict[str, dataclasses.Field]:
    """The fields of a section that are numbers of the compiled program, by their symbols."""
    found = (f for f in dataclasses.fields(section) if f.metadata["traced"] or f.metadata["symbol"])
    return {f.metadata["symbol"] or f.name: f for f in found}


def number(value: Any) -> Any:
    """A setting as a number: the length of a schedule that has none is FOREVER."""
    return FOREVER if value is None else value


def hyper_type(section: type) -> Any:
    """The NamedTuple of a section's numbers; their defaults are the settings' own."""
    known = hyper_fields(section)
    return namedtuple("Hyper", known, defaults=[number(f.default) for f in known.values()])


def hyper_values(kind: Any, cfg: Any) -> Any:
    """The numbers of a section as `kind`, a subclass of `hyper_type(type(cfg))`."""
    return kind(*(number(getattr(cfg, f.name)) for f in hyper_fields(type(cfg)).values()))


TRACED, KEPT = frozenset(fields_with("traced")), frozenset(fields_with("kept"))
DERIVED: dict[str, str] = fields_with("derived")
"""`section.field` -> the setting that says how many of them an iteration has."""
