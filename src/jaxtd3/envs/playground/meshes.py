"""Robot meshes without the 1.2 GB clone that Playground makes at the first robot it loads.

Training needs none of them where no mesh collides and every inertia is given, which is so for most
robots. In this order: an existing clone, the folder named by MENAGERIE_ROOT, the
`mujoco-menagerie` package's download of the one robot, and tetrahedra as stand-ins. Stand-ins are
refused where they would change the physics.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from etils import epath

from jaxtd3.thirdparty import playground_envs, private, replaced

ROBOTS = {  # Playground package -> the Menagerie folders it reads
    "locomotion/apollo": ("apptronik_apollo",),
    "locomotion/barkour": ("google_barkour_vb",),
    "locomotion/berkeley_humanoid": ("berkeley_humanoid",),
    "locomotion/g1": ("unitree_g1",),
    "locomotion/go1": ("unitree_go1",),
    "locomotion/h1": ("unitree_h1",),
    "locomotion/op3": ("robotis_op3",),
    "locomotion/spot": ("boston_dynamics_spot",),
    "locomotion/t1": ("booster_t1",),
    "manipulation/aero_hand": ("tetheria_aero_hand_open",),
    "manipulation/aloha": ("aloha",),
    "manipulation/franka_emika_panda": ("franka_emika_panda",),
    "manipulation/franka_emika_panda_robotiq": ("franka_emika_panda", "robotiq_2f85_v4"),
    "manipulation/leap_hand": ("leap_hand",),
}

STANDINS = "stand-ins"


@dataclass(frozen=True)
class MeshSource:
    """Where an environment's meshes came from."""

    kind: str  # "none needed", "clone", "MENAGERIE_ROOT", "mujoco-menagerie" or "stand-ins"
    robots: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == STANDINS:
            return (
                f"{', '.join(self.robots)}: no meshes found, physics unchanged, videos show "
                "collision shapes only (set MENAGERIE_ROOT to a mujoco_menagerie folder)"
            )
        return f"{', '.join(self.robots)} from {self.kind}" if self.robots else self.kind


def package_of(env_name: str) -> str:
    """The Playground package that defines an environment, as `locomotion/g1`."""
    maker = playground_envs().get(env_name)
    if maker is None:
        return ""
    cls = getattr(maker, "func", maker)
    # one of a user's own: the robot of the class that it is made from
    homes = [c.__module__ for c in getattr(cls, "__mro__", ())] or [cls.__module__]
    inside = [home.split("._src.")[1].split(".") for home in homes if "._src." in home]
    return "/".join(inside[0][:2]) if inside else ""


@contextlib.contextmanager
def menagerie_for(env_name: str) -> Iterator[MeshSource]:
    """While inside, Playground finds the meshes of `env_name`; assets are read during `load`."""
    package = package_of(env_name)
    robots = ROBOTS.get(package, ())
    with contextlib.ExitStack() as stack:
        kind, root = _find(package, robots, stack)
        with replaced("menagerie_path", epath.Path(root)):
            yield MeshSource(kind, robots)


def _find(package: str, robots: tuple[str, ...], stack: contextlib.ExitStack):
    if not robots:
        return "none needed", Path(__file__).parent
    clone = Path(os.fspath(private("menagerie_path")))
    if all((clone / r).is_dir() for r in robots):
        return "clone", clone
    named = os.environ.get("MENAGERIE_ROOT")
    if named and all((Path(named) / r).is_dir() for r in robots):
        return "MENAGERIE_ROOT", Path(named)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxtd3-meshes-")))
    if _download(robots, folder):
        return "mujoco-menagerie", folder
    _write_standins(package, robots, folder)
    return STANDINS, folder


def _download(robots: tuple[str, ...], folder: Path) -> bool:
    """Link the robots that the `mujoco-menagerie` package has or can fetch; False if it cannot."""
    try:
        import mujoco_menagerie
    except ImportError:
        return False
    saved = os.environ.pop("MENAGERIE_ROOT", None)  # it would look there, and nowhere else
    try:
        for robot in robots:
            (folder / robot).symlink_to(mujoco_menagerie.get(robot).path(progress=None))
    except (mujoco_menagerie.MenagerieError, OSError):
        for link in folder.iterdir():
            link.unlink()
        return False
    finally:
        if saved is not None:
            os.environ["MENAGERIE_ROOT"] = saved
    return True


def _write_standins(package: str, robots: tuple[str, ...], folder: Path) -> None:
    """A small file for every mesh and texture that the package's own XML files ask for."""
    source = Path(os.fspath(private("playground_root"))) / package
    own = {path.name for path in source.rglob("*")}
    assets = folder / robots[0] / "assets"
    assets.mkdir(parents=True)
    for xml in source.rglob("*.xml"):
        for name in re.findall(r'file="([^"]+)"', xml.read_text()):
            base = name.rsplit("/", 1)[-1]
            content = standin(base, 0.01)
            if base not in own and content is not None:
                (assets / base).write_bytes(content)


def standin(name: str, size: float) -> bytes | None:
    """A tetrahedron or a one-pixel picture, by the file's suffix; None for other kinds."""
    suffix = Path(name).suffix.lower()
    corners = size * np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    faces = [(0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3)]
    if suffix == ".stl":
        body = b"".join(
            struct.pack("<12fH", 0, 0, 0, *corners[list(face)].ravel(), 0) for face in faces
        )
        return b"\0" * 80 + struct.pack("<I", len(faces)) + body
    if suffix == ".obj":
        lines = ["v {} {} {}".format(*c) for c in corners]
        lines += ["f {} {} {}".format(*(i + 1 for i in face)) for face in faces]
        return ("\n".join(lines) + "\n").encode()
    if suffix == ".png":

        def chunk(tag: bytes, data: bytes) -> bytes:
            crc = struct.pack(">I", zlib.crc32(tag + data))
            return struct.pack(">I", len(data)) + tag + data + crc

        header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
        pixel = zlib.compress(b"\0\x80\x80\x80")
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"IDAT", pixel)
            + chunk(b"IEND", b"")
        )
    return None


def check_standins(env_name: str, model: mujoco.MjModel, xml: str, assets: dict) -> None:
    """Raise where a mesh takes part in the physics: it collides, or gives a body its mass."""
    mesh = model.geom_type == mujoco.mjtGeom.mjGEOM_MESH
    collides = mesh & ((model.geom_contype != 0) | (model.geom_conaffinity != 0))
    paired = np.isin(np.arange(model.ngeom), [*model.pair_geom1, *model.pair_geom2])
    reason = None
    if np.any(collides | (mesh & paired)):
        reason = "a mesh collides"
    else:
        larger = {
            name: (standin(name, 0.02) if data == standin(name, 0.01) else data)
            for name, data in assets.items()
        }
        other = mujoco.MjModel.from_xml_string(xml, assets=larger)
        for what in ("body_mass", "body_inertia", "body_ipos", "body_iquat"):
            if reason is None and not np.array_equal(getattr(model, what), getattr(other, what)):
                reason = f"a mesh decides {what}"
    if reason:
        raise ValueError(
            f"{env_name} needs its real meshes ({reason}): "
            "set MENAGERIE_ROOT to a mujoco_menagerie folder"
        )
