"""Actor and critics as flax.linen modules; parameters are plain pytrees.

FastTD3's layers: three hidden ones of h, h/2, h/4 units, every weight and bias drawn from
U(+-1/sqrt(fan_in)); the actor's last layer starts near zero. `NETWORKS` lists the kinds by name; a
new one is a function `(spec, cfg, outputs) -> Networks` and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array, EnvSpec
from jaxtd3.nets.dense import Dense, precision
from jaxtd3.nets.simba import SimbaActor, SimbaCritic, unit_columns

if TYPE_CHECKING:
    from jaxtd3.config.sections import AgentConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"relu": nn.relu, "elu": nn.elu, "silu": nn.silu}


class Networks(NamedTuple):
    """Initialisers and forward passes; observations already normalised."""

    init_actor: Callable[[Array], Any]
    init_critic: Callable[[Array], Any]
    actor: Callable[[Any, Array], Array]  # (params, actor_obs) -> action
    critic: Callable[[Any, Array, Array], Array]  # (params, critic_obs, action) -> [N, .., A]
    project: Callable[[Any], Any] = lambda params: params  # applied to what an optimiser step gave


# --- modules ------------------------------------------------------------------------------------


def uniform_fan_in(fan_in: int) -> Callable[..., Array]:
    """Initialiser U(-1/sqrt(fan_in), 1/sqrt(fan_in)), for kernels and biases alike."""
    bound = fan_in**-0.5

    def init(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nn.Module):
    """y = x W + b, initialised as above."""

    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = uniform_fan_in(x.shape[-1])
        return Dense(self.features, self.dtype, kernel_init=init, bias_init=init, name="dense")(x)


class SimNorm(nn.Module):
    """Dense, LayerNorm, then a softmax within each of `groups` groups of `dim` units."""

    groups: int
    dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = Linear(self.groups * self.dim, self.dtype, name="linear")(x).astype(jnp.float32)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        grouped = x.reshape(*x.shape[:-1], self.groups, self.dim)
        return jax.nn.softmax(grouped).reshape(x.shape)


class Trunk(NamedTuple):
    """The hidden layers: x -> h -> h/2 -> h/4, or h -> h/2 -> SimNorm."""

    hidden: int
    dtype: Any = jnp.float32
    activation: str = "relu"
    layer_norm: bool = False
    simnorm: tuple[int, int] | None = None  # (groups, dim) of the third layer

    def __call__(self, x: Array) -> Array:
        """Called within a compact module, whose own parameters the layers' become."""
        for i in range(2 if self.simnorm else 3):
            x = Linear(self.hidden // 2**i, self.dtype, name=f"layer{i}")(x)
            if self.layer_norm:
                x = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name=f"norm{i}")(x)
            x = ACTIVATIONS[self.activation](x)
        return SimNorm(*self.simnorm, self.dtype, name="simnorm")(x) if self.simnorm else x


class Actor(nn.Module):
    """obs -> hidden layers -> action, tanh."""

    action_size: int
    trunk: Trunk
    last_std: float = 0.01

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = Dense(
            self.action_size,
            self.trunk.dtype,
            kernel_init=nn.initializers.normal(self.last_std),
            name="out",
        )(self.trunk(obs))
        return jnp.tanh(x.astype(jnp.float32))


class Critic(nn.Module):
    """(critic_obs, action) -> hidden layers -> outputs, such as logits over atoms."""

    outputs: int
    trunk: Trunk

    @nn.compact
    def __call__(self, obs: Array, action: Array) -> Array:
        x = self.trunk(jnp.concatenate([obs, action], axis=-1))
        return Linear(self.outputs, self.trunk.dtype, name="out")(x).astype(jnp.float32)


class Ensemble(nn.Module):
    """N critics of their own parameters: outputs [N, .., A].

    Separate modules, not one batched matrix product: XLA's CPU back end runs the latter far slower.
    """

    make: Callable[..., nn.Module]
    size: int = 2

    @nn.compact
    def __call__(self, obs: Array, action: Array) -> Array:
        return jnp.stack([self.make(name=f"q{i}")(obs, action) for i in range(self.size)])


# --- as values ----------------------------------------------------------------------------------


def forward(module: nn.Module) -> Callable[..., Any]:
    return lambda params, *inputs: module.apply({"params": params}, *inputs)


def bind(spec: EnvSpec, actor: nn.Module, critic: nn.Module, **more: Any) -> Networks:
    """Two modules as `Networks`."""
    x, c = jnp.zeros((1, spec.obs_size)), jnp.zeros((1, spec.critic_size))
    a = jnp.zeros((1, spec.action_size))
    return Networks(
        init_actor=lambda key: actor.init(key, x)["params"],
        init_critic=lambda key: critic.init(key, c, a)["params"],
        actor=forward(actor),
        critic=forward(critic),
        **more,
    )


def compute_dtype(cfg: AgentConfig) -> Any:
    return jnp.bfloat16 if precision(cfg.compute) == "bf16" else jnp.float32


def mlp_networks(
    spec: EnvSpec,
    cfg: AgentConfig,
    outputs: int | None = None,
    *,
    simnorm_actor: bool = False,
    simnorm_critic: bool = False,
) -> Networks:
    """FastTD3's MLPs."""

    def trunk(hidden: int, simnorm: bool) -> Trunk:
        shape = (cfg.simnorm_groups, cfg.simnorm_dim) if simnorm else None
        return Trunk(hidden, compute_dtype(cfg), cfg.activation, cfg.layer_norm, shape)

    def make_critic(name: str) -> nn.Module:
        body = trunk(cfg.critic_hidden, simnorm_critic)
        return Critic(outputs or cfg.num_atoms, body, name=name)

    actor = Actor(spec.action_size, trunk(cfg.actor_hidden, simnorm_actor))
    return bind(spec, actor, Ensemble(make_critic, cfg.num_critics))


def simnorm_networks(spec: EnvSpec, cfg: AgentConfig, outputs: int | None = None) -> Networks:
    """The MLPs with a SimNorm as third layer, in actor, critic or both."""
    return mlp_networks(
        spec,
        cfg,
        outputs,
        simnorm_actor=cfg.simnorm_in in ("actor", "both"),
        simnorm_critic=cfg.simnorm_in in ("critic", "both"),
    )


def simba_networks(spec: EnvSpec, cfg: AgentConfig, outputs: int | None = None) -> Networks:
    """SimbaV2; with `reproject` every weight column goes back to the unit sphere after a step."""
    dtype = compute_dtype(cfg)

    def make_critic(name: str) -> nn.Module:
        return SimbaCritic(
            outputs or cfg.num_atoms, cfg.critic_hidden, cfg.critic_blocks, dtype=dtype, name=name
        )

    actor = SimbaActor(spec.action_size, cfg.actor_hidden, cfg.actor_blocks, dtype=dtype)
    more = {"project": unit_columns} if cfg.reproject else {}
    return bind(spec, actor, Ensemble(make_critic, cfg.num_critics), **more)


NETWORKS: dict[str, Callable[..., Networks]] = {
    "mlp": mlp_networks,
    "simnorm": simnorm_networks,
    "simbav2": simba_networks,
}
