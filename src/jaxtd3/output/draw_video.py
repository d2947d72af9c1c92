"""Draw a recorded trajectory: a program of its own, started by `video.py`.

A crash in a graphics driver ends this process and nothing else, and MUJOCO_GL can still be chosen,
which MuJoCo reads once, when it is imported. It needs NumPy and MuJoCo only, so it starts quickly.

    python -P draw_video.py           draw one small picture; the name of what draws it on stdout
    python -P draw_video.py FOLDER    model.mjb, job.json, trajectory.npz -> RGB frames on stdout
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import mujoco
import numpy as np

BALL = '<mujoco><worldbody><light pos="0 0 3"/><geom size="1"/></worldbody></mujoco>'


MANY_FACES = 20_000


def probe() -> str:
    """What draws here (as "llvmpipe"); raises unless a ball can be seen in a picture of one."""
    from OpenGL import GL

    model = mujoco.MjModel.from_xml_string(BALL)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, 8, 8)
    renderer.update_scene(data)
    bright = renderer.render().max()
    name = GL.glGetString(GL.GL_RENDERER).decode()
    renderer.close()
    if not bright:
        raise RuntimeError("the picture is black")
    return name


def view(model: mujoco.MjModel, camera: int) -> mujoco.MjvCamera:
    """The model's own camera of that index, or (-1) one that follows the root body."""
    cam = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, cam)
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    if camera >= 0:
        cam.type, cam.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera
    elif free.size:
        cam.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        cam.trackbodyid = model.jnt_bodyid[free[0]]
    return cam


def visible(shapes: bool) -> mujoco.MjvOption:
    """MuJoCo's defaults; `shapes`: also collision shapes and the ellipsoids of inertia."""
    option = mujoco.MjvOption()
    if shapes:
        option.geomgroup[:] = 1
        option.flags[mujoco.mjtVisFlag.mjVIS_INERTIA] = 1
    return option


def make_renderer(model: mujoco.MjModel, height: int, width: int, fast: bool) -> mujoco.Renderer:
    """`fast`: no smoothed edges, and no shadows of large meshes: a tenth of the time on a CPU."""
    model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
    model.vis.global_.offheight = max(height, model.vis.global_.offheight)
    if fast:
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = min(1024, model.vis.quality.shadowsize)
    renderer = mujoco.Renderer(model, height, width)
    if fast and model.nmeshface > MANY_FACES:
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
    return renderer


def draw(folder: Path, out: BinaryIO) -> None:
    """Write one frame per row of the trajectory."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    model = mujoco.MjModel.from_binary_path(str(folder / "model.mjb"))
    with np.load(folder / "trajectory.npz", allow_pickle=False) as file:
        rows = {name: file[name] for name in file.files}
    data = mujoco.MjData(model)
    renderer = make_renderer(model, job["height"], job["width"], job["fast"])
    cam, option = view(model, job["camera"]), visible(job["shapes"])
    for i in range(len(rows["qpos"])):
        for name, values in rows.items():
            getattr(data, name)[:] = values[i]
        mujoco.mj_forward(model, data)
        renderer.update_scene(data, cam, option)
        out.write(renderer.render().tobytes())
    out.flush()
    renderer.close()


def main(argv: list[str]) -> None:
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between the frames
    if argv:
        draw(Path(argv[0]), frames)
    else:
        frames.write(probe().encode())
        frames.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
