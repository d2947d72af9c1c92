"""FastTD3's work as PyTorch does it: eager, one operation after the other, replay beside the env.

A peer for `jaxtd3 bench --torch`, where PyTorch is installed. Environments and sizes are those of
the bench; what differs is who learns. It does what FastTD3 does in an iteration, in its order: an
exploring policy, a ring of whole transitions, statistics that also take in every sampled batch,
each critic projected by itself, AdamW over lists of tensors.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jaxtd3.bench.timing import Task
from jaxtd3.errors import UserError
from jaxtd3.run.program import Program


def mlp(widths: list[int], *last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for m, n in itertools.pairwise(widths):
        layers += [nn.Linear(m, n), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *last)


class Normalizer:
    """Running mean and spread of everything that goes through it."""

    def __init__(self, width: int):
        self.count, self.mean, self.var = 0, torch.zeros(width), torch.ones(width)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        n, total = x.shape[0], self.count + x.shape[0]
        shift = x.mean(0) - self.mean
        spread = self.var * self.count + ((x - x.mean(0)) ** 2).sum(0)
        self.var = (spread + shift**2 * (self.count * n / total)) / total
        self.mean = self.mean + shift * (n / total)
        self.count = total
        return (x - self.mean) / (self.var.sqrt() + 0.01)


class Ring:
    """Transitions by environment and time; a batch takes equally many from each environment."""

    def __init__(self, envs: int, length: int, sizes: dict[str, tuple[int, ...]]):
        shape = (envs, length)
        self.data = {k: torch.zeros(*shape, *n) for k, n in sizes.items()}
        self.head, self.size, self.length = 0, 0, length

    def add(self, row: dict[str, Tensor]) -> None:
        for name, value in row.items():
            self.data[name][:, self.head] = value
        self.head = (self.head + 1) % self.length
        self.size = min(self.size + 1, self.length)

    def sample(self, each: int) -> dict[str, Tensor]:
        envs = self.data["reward"].shape[0]
        index = torch.randint(self.size, (envs, each))

        def take(x: Tensor) -> Tensor:
            wide = index if x.ndim == 2 else index[..., None].expand(-1, -1, x.shape[-1])
            return x.gather(1, wide).flatten(0, 1)

        return {name: take(x) for name, x in self.data.items()}


def project(z: Tensor, p: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """C51's projection: p [B, A] moved to reward + discount * z and back onto z."""
    size, (batch, _) = z.shape[0], p.shape
    moved = (reward[:, None] + discount[:, None] * z).clamp(z[0], z[-1])
    b = (moved - z[0]) / (z[1] - z[0])
    low = b.floor().long().clamp(0, size - 2)
    row = torch.arange(batch)[:, None] * size
    out = torch.zeros_like(p)
    flat = out.view(-1)
    flat.index_add_(0, (row + low).view(-1), (p * (low + 1 - b)).view(-1))
    flat.index_add_(0, (row + low + 1).view(-1), (p * (b - low)).view(-1))
    return out


class Learner:
    """One run of FastTD3 on the environments of `program`."""

    def __init__(self, program: Program, seed: int = 0):
        torch.manual_seed(seed)
        cfg, env = program.config, program.env
        self.env, self.agent, self.loop, self.spec = env, cfg.agent, cfg.loop, env.spec
        g, h, a = self.agent.critic_hidden, self.agent.actor_hidden, self.agent.num_atoms
        wide = self.spec.critic_size + self.spec.action_size

        def critics() -> nn.ModuleList:
            return nn.ModuleList(mlp([wide, g, g // 2, g // 4, a]) for _ in range(2))

        widths = [self.spec.obs_size, h, h // 2, h // 4, self.spec.action_size]
        self.actor, self.critics, self.target = mlp(widths, nn.Tanh()), critics(), critics()
        self.target.load_state_dict(self.critics.state_dict())
        adamw = partial(torch.optim.AdamW, weight_decay=self.agent.weight_decay)
        self.opt_actor = adamw(self.actor.parameters(), self.agent.actor_lr)
        self.opt_critic = adamw(self.critics.parameters(), self.agent.critic_lr)
        self.z = torch.linspace(self.agent.v_min, self.agent.v_max, a)
        sizes: dict[str, tuple[int, ...]] = {"reward": (), "discount": ()}
        sizes |= {"obs": (self.spec.width,), "next_obs": (self.spec.width,)}
        sizes |= {"action": (self.spec.action_size,)}
        self.ring = Ring(env.num_envs, cfg.replay.length, sizes)
        self.each = max(1, cfg.replay.batch_size // env.num_envs)
        self.normalize = Normalizer(self.spec.width)
        self.sigma = self.sample_sigma()
        self.key = jax.random.key(seed)
        self.env_state = env.init(self.key)
        self.env_step = jax.jit(self.step_envs, donate_argnums=0)
        self.obs = torch.from_dlpack(self.env_state.obs)

    def step_envs(self, state: Any, action: Any, key: Any) -> Any:
        key, now = jax.random.split(key)
        state, tr, _ = self.env.step(state, action, now)
        return state, key, (state.obs, tr.final_obs, tr.action, tr.reward, tr.terminated, tr.done)

    def sample_sigma(self) -> Tensor:
        low, high = self.loop.sigma_min, self.loop.sigma_max
        return torch.rand(self.env.num_envs, 1) * (high - low) + low

    @torch.no_grad()
    def collect(self) -> None:
        action = self.actor(self.spec.actor_obs(self.normalize(self.obs)))
        action = (action + torch.randn_like(action) * self.sigma).clamp(-1, 1)
        given = jax.dlpack.from_dlpack(action.contiguous())
        before = self.obs.clone()  # the state that holds it is donated
        self.env_state, self.key, out = self.env_step(self.env_state, given, self.key)
        self.obs, final, did, reward, ended, done = (torch.from_dlpack(x) for x in out)
        row = {"obs": before, "next_obs": final, "action": did, "reward": reward}
        self.ring.add(row | {"discount": self.agent.gamma * (1.0 - ended.float())})
        self.sigma = torch.where(done[:, None], self.sample_sigma(), self.sigma)

    def logits(self, critics: nn.ModuleList, x: Tensor, action: Tensor) -> list[Tensor]:
        inputs = torch.cat([self.spec.critic_obs(x), action], 1)
        return [q(inputs) for q in critics]

    @torch.no_grad()
    def targets(self, batch: dict[str, Tensor]) -> list[Tensor]:
        noise = torch.randn_like(batch["action"]) * self.agent.policy_noise
        noise = noise.clamp(-self.agent.noise_clip, self.agent.noise_clip)
        action = (self.actor(self.spec.actor_obs(batch["next_obs"])) + noise).clamp(-1, 1)
        logits = self.logits(self.target, batch["next_obs"], action)
        both = [project(self.z, x.softmax(1), batch["reward"], batch["discount"]) for x in logits]
        if not self.agent.cdq:
            return both
        q1, q2 = (p @ self.z for p in both)
        return [torch.where((q1 < q2)[:, None], *both)] * 2

    def update(self, with_policy: bool) -> None:
        batch = self.ring.sample(self.each)
        for name in ("obs", "next_obs"):
            batch[name] = self.normalize(batch[name])
        targets = self.targets(batch)
        logits = self.logits(self.critics, batch["obs"], batch["action"])
        pairs = zip(targets, logits, strict=True)
        loss = sum(-(t * F.log_softmax(x, 1)).sum(1).mean() for t, x in pairs)
        self.descend(self.opt_critic, loss)
        if with_policy:
            action = self.actor(self.spec.actor_obs(batch["obs"]))
            q1, q2 = (
                x.softmax(1) @ self.z for x in self.logits(self.critics, batch["obs"], action)
            )
            q = torch.minimum(q1, q2) if self.agent.cdq else (q1 + q2) / 2
            self.descend(self.opt_actor, -q.mean())
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.target.parameters()), list(self.critics.parameters()), self.agent.tau
            )

    @staticmethod
    def descend(opt: torch.optim.Optimizer, loss: Any) -> None:
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    def iterate(self) -> None:
        for _ in range(self.loop.collect_steps):
            self.collect()
        every = self.loop.critic_updates // self.loop.policy_updates
        for i in range(self.loop.critic_updates):
            self.update((i + 1) % every == 0)


def torch_task(program: Program, length: int) -> Task:
    """`length` iterations, the ring full."""
    agent = program.config.agent
    if program.mesh.size > 1 or (agent.num_critics, agent.network, agent.critic) != (
        2,
        "mlp",
        "c51",
    ):
        raise UserError("--torch knows FastTD3 alone: one device, two c51 critics, network mlp")
    learner = Learner(program)
    for x in learner.ring.data.values():
        x.normal_()
    learner.ring.size = learner.ring.length

    def run() -> None:
        for _ in range(length):
            learner.iterate()

    return Task("torch", run, length)
