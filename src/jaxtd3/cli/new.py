"""`jaxtd3 new DIR --mjcf robot.xml`: look at the model, then write a package that trains it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    import mujoco

    from jaxtd3.cli.main import New
    from jaxtd3.envs.robot import Robot
    from jaxtd3.new.findings import Finding
    from jaxtd3.new.mjcf import Mjcf

TEMPLATES = Path(__file__).parents[1] / "new" / "templates"
TASKS = ("stand", "velocity", "reach")
MODEL = "model"  # folder of the MJCF and its assets


def new_command(args: New, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 new`."""
    if args.task not in TASKS:
        raise UserError(nearest("task", args.task, TASKS))
    if args.mjcf is None:
        raise UserError("--mjcf is missing: name the robot's MJCF file")
    if args.dir.exists():
        raise UserError(f"{args.dir} is there already: choose another folder")
    if not args.dir.absolute().parent.is_dir():
        raise UserError(f"{args.dir.absolute().parent} is not a folder")
    from jaxtd3.new.findings import look
    from jaxtd3.new.mjcf import Mjcf

    mjcf = Mjcf(args.mjcf)
    model = mjcf.compile()
    findings = look(model, args.task)
    for finding in findings:
        tell(finding)
    missing = [f.what for f in findings if f.needed and not f.there]
    if missing:
        raise UserError(f"{mjcf.main} lacks {' and '.join(missing)}: nothing was written")
    print(f"MJX: {mjx_obstacle(model) or 'runs it too (--impl jax)'}")
    write(args.dir, mjcf, model, args.task)
    reference = f"{args.dir / 'env.py'}:{args.task.capitalize()}"
    print(f"\n{args.dir}: read env.py, then\n  jaxtd3 train --env {reference} --max-time 600")
    return 0


def tell(finding: Finding) -> None:
    """One line about what is there; what is missing comes with the lines to add."""
    if finding.there:
        print(f"{finding.what}: {finding.there}")
        return
    print(f"{finding.what}: missing; {finding.advice or 'it is needed'}", file=sys.stderr)
    if finding.lines:
        indented = "\n".join(f"    {line}" for line in finding.lines.splitlines())
        print(f"  add to the MJCF:\n{indented}", file=sys.stderr)


def mjx_obstacle(model: mujoco.MjModel) -> str:
    """What keeps MJX from running a model, in a line; empty: nothing that it knows of."""
    from mujoco import mjx

    try:
        mjx.put_model(model, impl="jax")
    except (NotImplementedError, ValueError) as error:
        return f"does not run it: {' '.join(str(error).split())[:200]}"
    return ""


# --- writing ------------------------------------------------------------------------------------


def write(folder: Path, mjcf: Mjcf, model: mujoco.MjModel, task: str) -> None:
    """The whole package or nothing: made beside its place, then moved there."""
    from jaxtd3.new.findings import floor

    values = template_values(folder, mjcf, model, task)
    place = folder.absolute().parent
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=place))
    except OSError as error:
        raise UserError(f"cannot write to {place}: {error.strerror}") from error
    try:
        mjcf.write(part / MODEL)
        if task != "reach" and not floor(model).there:
            fill("scene.xml", part / MODEL / "scene.xml", values)
        fill(f"{task}.py", part / "env.py", values)
        fill("test_env.py", part / "test_env.py", values)
        fill("README.md", part / "README.md", values)
        part.chmod(0o755)
        check(part, task)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fill(template: str, out: Path, values: Mapping[str, str]) -> None:
    """Write a template with its names filled in."""
    text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    out.write_text(Template(text).substitute(values), encoding="utf-8")


def template_values(folder: Path, mjcf: Mjcf, model: mujoco.MjModel, task: str) -> dict[str, str]:
    """What the templates ask for. Names of the model become literals: they may hold anything."""
    import mujoco

    from jaxtd3.envs.robot import Robot
    from jaxtd3.new.findings import floor, is_servo, sensor_of

    robot = Robot(model)
    height = float(robot.start.qpos[robot.base_qpos + 2]) if robot.base is not None else 1.0
    gyro = sensor_of(model, mujoco.mjtSensor.mjSENS_GYRO)
    grounded = task == "reach" or floor(model).there
    values = {
        "title": re.sub(r"[^A-Za-z0-9_. -]", "", folder.name) or "robot",
        "folder": shlex.quote(folder.name),
        "task": task,
        "cls": task.capitalize(),
        "mjcf": repr(str(mjcf.main) if grounded else "scene.xml"),
        "robot_xml": str(mjcf.main).replace("&", "&amp;").replace('"', "&quot;"),
        "gyro": f"s.sensor({gyro!r})" if gyro else "s.turning",
        "height": f"{height:.3g}",
        "low": f"{0.6 * height:.3g}",
        "scale": "0.5" if is_servo(model) else "None",
    }
    more = {"reach": reach_values, "velocity": stride_values}.get(task)
    return values | (more(model, robot) if more else {})


def stride_values(model: mujoco.MjModel, robot: Robot) -> dict[str, str]:
    """Feet, and strides that suit legs of that length: what walks fast has short legs."""
    from jaxtd3.new.findings import feet, leans_sideways

    rows = [f"    (lambda s: {f.where}[2], {f.ground:.3g}, {f.phase:g}),\n" for f in feet(model)]
    height = max(0.05, float(robot.start.qpos[robot.base_qpos + 2]))
    speed = min(1.0, max(0.3, round(2 * height, 1)))
    sideways = leans_sideways(model)
    return {
        "feet": f"[\n{''.join(rows)}]" if rows else "[]",
        "strides": f"{1.2 / height**0.5:.2g}",
        "lift": f"{0.12 * height:.2g}",
        "speed": f"{speed:g}",
        "back": f"{speed / 2:g}",
        "left": f"(-{speed / 4:g}, {speed / 4:g})" if sideways else "(0.0, 0.0)",
        "turn": "1.0" if sideways else "0.5",
        "width": f"{0.4 * speed:.2g}",
    }


def reach_values(model: mujoco.MjModel, robot: Robot) -> dict[str, str]:
    """The part that reaches, and a box of places where random poses put it."""
    import mujoco
    import numpy as np

    site = model.nsite > 0 and mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_SITE, model.nsite - 1)
    body = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_BODY, model.nbody - 1)
    if not site and not body:
        raise UserError("the last body has no name: name it, or give it a site, to reach with")
    data, rng, seen = mujoco.MjData(model), np.random.default_rng(0), []
    single = np.isin(model.jnt_qposadr, robot.joint_qpos)
    limited = model.jnt_limited[single].astype(bool)[:, None]
    ranges = np.where(limited, model.jnt_range[single], [-np.pi, np.pi])
    for _ in range(500):
        data.qpos[robot.joint_qpos] = rng.uniform(*ranges.T)
        mujoco.mj_kinematics(model, data)
        seen.append((data.site_xpos[-1] if site else data.xpos[-1]).copy())
    low, high = np.percentile(seen, [20, 80], axis=0)
    values = {f"{axis}_low": f"{low[i]:.3f}" for i, axis in enumerate("xyz")}
    values |= {f"{axis}_high": f"{high[i]:.3f}" for i, axis in enumerate("xyz")}
    return values | {"hand": f"s.site({site!r})" if site else f"s.body({body!r})"}


def check(folder: Path, task: str) -> None:
    """Load what was written, as `jaxtd3 train` will."""
    from jaxtd3.config.sections import EnvConfig
    from jaxtd3.envs import make_env

    make_env(EnvConfig(f"{folder / 'env.py'}:{task.capitalize()}", num_envs=1))
