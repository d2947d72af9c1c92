"""C MuJoCo as if it were the robot: physics in a thread of its own, in real time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from policy_runtime import BadInput
from robot_api import Sensors

LATE = 0.1  # seconds behind the clock after which lost time is let go


class MujocoRobot:
    """The four functions of `robot_api.Robot` for a MuJoCo model.

    The robot hangs from a gantry, its base held, until `hang` seconds after the first target.
    """

    def __init__(self, model: str, hang: float = 0.0):
        if not Path(model).is_file():
            raise BadInput(f"{model} is no file: export --controller --with-model writes robot.xml")
        try:
            self.model = mujoco.MjModel.from_xml_path(model)
        except ValueError as error:
            raise BadInput(f"{model} is no MuJoCo model: {str(error).splitlines()[0]}") from error
        self.hang, self.feed = hang, True
        self.data: Any = None  # MjData, once connected
        self._lock = threading.Lock()
        self._sensors: Sensors | None = None
        self._release = math.inf
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.damped_at: float | None = None
        self.lost = 0.0  # seconds that the simulation fell behind

    # --- the four functions ---------------------------------------------------------------------

    def connect(self, about: Mapping[str, Any]) -> None:
        model = self.model
        names = [model.joint(j).name for j in range(1, model.njnt)]
        if names != about["joint_names"]:
            raise BadInput(f"the model is not of {about['robot']}: its joints are others")
        sensors = about["sensors"]
        self._places = {}
        try:
            self._site = model.site(sensors["site"]).id
            for name in ("gyro", "linvel"):
                sensor = model.sensor(sensors[name])
                self._places[name] = slice(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))
            key = model.key(about["keyframe"]).id
        except KeyError as error:
            raise BadInput(f"the model is not Playground's {about['robot']}: {error}") from error
        model.opt.timestep = about["physics_dt"]
        self.data = data = mujoco.MjData(model)
        mujoco.mj_resetDataKeyframe(model, data, key)
        self._base = data.qpos[:7].copy()
        low, high = np.asarray(about["joint_low"]), np.asarray(about["joint_high"])
        data.qpos[7:] = np.clip(0.5 * data.qpos[7:], low, high)  # hanging loosely
        mujoco.mj_forward(model, data)
        self.damp(np.asarray(about["kd"]))
        self.damped_at = None
        self._publish()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def read_sensors(self) -> Sensors | None:
        return self._sensors

    def write_targets(self, targets: np.ndarray, kp: np.ndarray, kd: np.ndarray) -> None:
        with self._lock:
            if self._release == math.inf:
                self._release = time.monotonic() + self.hang
            self._set_gains(kp, kd)
            self.data.ctrl[:] = targets

    def damp(self, kd: np.ndarray) -> None:
        with self._lock:
            if self.data is not None:  # else nothing was ever driven
                self._set_gains(np.zeros_like(kd), kd)
            self.damped_at = time.monotonic()

    # --- the simulation -------------------------------------------------------------------------

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _set_gains(self, kp: np.ndarray, kd: np.ndarray) -> None:
        model = self.model
        model.actuator_gainprm[:, 0], model.actuator_biasprm[:, 1] = kp, -kp
        model.actuator_biasprm[:, 2] = 0.0
        model.dof_damping[6:] = kd

    def _publish(self) -> None:
        data = self.data
        values = {name: data.sensordata[place].copy() for name, place in self._places.items()}
        values["gravity"] = -data.site_xmat[self._site].reshape(3, 3)[2]
        values["joint_positions"] = data.qpos[7:].copy()
        values["joint_velocities"] = data.qvel[6:].copy()
        self._sensors = Sensors(time.monotonic(), values)

    def _run(self) -> None:
        """Step so that simulated time keeps to the wall clock."""
        dt = self.model.opt.timestep
        due = time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if now - due > LATE:
                self.lost += now - due
                due = now
            with self._lock:
                while due <= now:
                    mujoco.mj_step(self.model, self.data)
                    if now < self._release:
                        self.data.qpos[:7], self.data.qvel[:6] = self._base, 0.0
                    due += dt
                if self.feed:
                    self._publish()
            time.sleep(max(0.0, due - time.monotonic(), 0.001))
