"""The first half hour with jaxtd3: train, plot, watch, export. It takes a minute or so.

Run it as a whole (`python experiments/first_half_hour.py`), or cell by cell in an editor that
knows `# %%`. What it makes goes to runs/first_half_hour.
"""

# ruff: noqa: E402
# %% Before JAX starts: a compiler fix for CPUs, and a cache that makes the second run start faster
from jaxtd3.runtime import prepare

prepare()

import time
from pathlib import Path

import jax
import numpy as np

import jaxtd3
from jaxtd3.output import onnx as export
from jaxtd3.output import plots, video

OUT = Path("runs/first_half_hour")
OUT.mkdir(parents=True, exist_ok=True)


# %% An environment of your own is a class with a spec, `reset` and `step`. This one swings a rod;
# all it lacks is a picture. (Playground's, such as "CartpoleBalance", are drawn by MuJoCo.)
class Rod(jaxtd3.Pendulum):
    """The pendulum that comes with jaxtd3, with eyes to see it."""

    preset = {"gamma": 0.99, "v_min": -500.0, "v_max": 0.0}  # noqa: RUF012

    def draw(self, state) -> np.ndarray:
        y, x = np.mgrid[1.5:-1.5:240j, -1.5:1.5:240j]
        tip_x, tip_y = np.sin(state.angle), np.cos(state.angle)
        along = np.clip(x * tip_x + y * tip_y, 0, 1)
        away = np.hypot(x - along * tip_x, y - along * tip_y)
        return np.where((away < 0.08)[..., None], [37, 99, 201], [243, 245, 248]).astype(np.uint8)


jaxtd3.register_env("Rod", Rod)

# %% The parts. Each is a value: print it, change a setting, or put one of your own in its place
cfg = jaxtd3.preset("Rod", profile="cpu", batch_size=512, eval_episodes=64)
program = jaxtd3.build(cfg)
env, agent = program.env, program.agent
print(f"{env.spec.name}: {env.spec.obs_size} numbers in, {env.spec.action_size} out")

# %% One compiled program: 100 iterations of stepping every environment and learning from the replay
state = program.start()
start = time.perf_counter()
program = program._replace(chunk=program.chunk.lower(state).compile())
print(f"compiled in {time.perf_counter() - start:.1f} s")

# %% Train. The state goes in and comes out; nothing else changes. About -145 is as good as it gets
rows, seconds = [], 0.0
for i in range(1, 11):
    start = time.perf_counter()
    state, metrics = program.advance(state)
    metrics = {name: float(value) for name, value in metrics.items()}  # waits for the device
    seconds += time.perf_counter() - start
    scores = program.evaluate(state.agent, state.weights, jax.random.key(1))
    row = {"iteration": 100 * i, "env_steps": 100 * i * env.num_envs, "seconds": seconds}
    rows.append(row | metrics | {f"eval/{name}": float(x) for name, x in scores.items()})
    print(f"{100 * i:5d} iterations  {seconds:5.1f} s  return {rows[-1]['eval/return']:7.1f}")

# %% Plot
panels = plots.learning_panels(rows) + plots.small_panels(rows, "train/")
(OUT / "curves.png").write_bytes(plots.png(plots.draw(panels, columns=2)))
print("curves:", OUT / "curves.png")

# %% Watch
video = video.render_video(env, agent, state.agent, jax.random.key(2), OUT / "video.mp4")
print("video: ", video)

# %% Take it elsewhere: one file that a controller can run without JAX
try:
    error = export.export_onnx(env, state.agent, cfg.agent, OUT / "policy.onnx")
    print(f"policy: {OUT / 'policy.onnx'} (differs from JAX by {error:.0e} at most)")
except jaxtd3.UserError as reason:  # onnx is optional
    print("policy:", reason)

# %% Next: `python -m jaxtd3.train --env G1JoystickFlatTerrain` does all of this for a humanoid
