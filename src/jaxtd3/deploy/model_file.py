"""The robot's physics as one MuJoCo file that needs neither Playground nor meshes.

The meshes of G1 and T1 are drawn, but neither collide nor carry mass: they are left out. That the
file steps as the training model does is checked before it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from jaxtd3.envs.playground.adapter import spec_of
from jaxtd3.errors import UserError

SAME = (
    "body_mass",
    "body_inertia",
    "body_ipos",
    "body_iquat",
    "jnt_range",
    "dof_damping",
    "dof_armature",
    "dof_frictionloss",
    "actuator_gainprm",
    "actuator_biasprm",
    "actuator_ctrlrange",
    "key_qpos",
    "pair_friction",
    "sensor_adr",
)
"""Model fields that must be equal; geometries have other numbers without the meshes."""


def write_model(robot: Any, folder: Path, name: str, note: str) -> None:
    """Write the model of an unwrapped environment, and the pictures that its ground needs.

    `note` says in the file where the model is from and what its licence is.
    """
    model: mujoco.MjModel = robot.mj_model
    spec = spec_of(robot)
    spec.option.timestep = model.opt.timestep
    spec.option.ccd_iterations = model.opt.ccd_iterations
    for geom in [g for g in spec.geoms if g.type == mujoco.mjtGeom.mjGEOM_MESH]:
        spec.delete(geom)
    for mesh in list(spec.meshes):
        spec.delete(mesh)
    needed = {Path(field.file).name for field in spec.hfields if field.file}
    needed |= {Path(texture.file).name for texture in spec.textures if texture.file}
    assets = {Path(key).name: value for key, value in robot.model_assets.items()}
    spec.compile()
    for path in needed:
        (folder / path).write_bytes(assets[path])
    spec.meshdir = spec.texturedir = ""
    for part in (*spec.hfields, *spec.textures):
        if part.file:
            part.file = Path(part.file).name
    (folder / name).write_text(f"<!-- {note} -->\n{spec.to_xml()}")
    check_model(model, mujoco.MjModel.from_xml_path(str(folder / name)))


def check_model(model: mujoco.MjModel, written: mujoco.MjModel) -> None:
    """Raise unless a written model is the training model, meshes apart."""
    for name in SAME:
        a, b = getattr(model, name), getattr(written, name)
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-5, atol=1e-9):
            raise UserError(f"the model cannot be written: {name} would change")
    for name in ("timestep", "iterations", "ls_iterations", "integrator", "solver", "cone"):
        if getattr(model.opt, name) != getattr(written.opt, name):
            raise UserError(f"the model cannot be written: option {name} would change")
