"""A MuJoCo model as triangles for a browser: one list per body, in the body's own frame.

The file is `u32 length | JSON | vertices`; a vertex is 20 bytes: position (3 float32), normal
(4 int8, the last unused), colour (4 uint8). Meshes with many faces are made coarser first: what a
hand cannot tell apart on a screen need not be sent and drawn fifty times a second.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import mujoco
import numpy as np

VERTEX = np.dtype([("position", "<f4", 3), ("normal", "i1", 4), ("colour", "u1", 4)])
MOST_FACES = 80_000  # of all meshes together
CREASE = 0.6  # cosine: edges sharper than this stay sharp
GRID = 128  # rows and columns of a height field that are drawn at most
SHOWN_GROUPS = (0, 1, 2)  # as MuJoCo's own viewer does


class Triangles(NamedTuple):
    vertices: np.ndarray  # [V, 3]
    faces: np.ndarray  # [F, 3] int
    normals: np.ndarray | None = None  # [3 F, 3] of the faces' corners, where they are known


def pack_scene(model: mujoco.MjModel, shapes: bool = False) -> bytes:
    """All that is drawn of a model; `shapes`: collision shapes and inertias too, where the meshes
    are stand-ins."""
    coarse = coarse_meshes(model)
    per_body: list[list[np.ndarray]] = [[] for _ in range(model.nbody)]
    floor, drawn = None, set()
    for i in range(model.ngeom):
        rgba = geom_rgba(model, i)
        if rgba[3] == 0 or not (shapes or model.geom_group[i] in SHOWN_GROUPS):
            continue
        if model.geom_type[i] == mujoco.mjtGeom.mjGEOM_PLANE:
            floor = float(model.geom_pos[i, 2])
            continue
        key = (model.geom_bodyid[i], model.geom_type[i], model.geom_dataid[i])
        key += tuple(np.concatenate([model.geom_pos[i], model.geom_size[i]]).round(6))
        found = geom_triangles(model, i, coarse)
        if found is not None and key not in drawn:  # some models hold a mesh twice
            drawn.add(key)
            body = int(model.geom_bodyid[i])
            per_body[body].append(place(found, model.geom_pos[i], model.geom_quat[i], rgba))
    if shapes:
        for body in range(1, model.nbody):
            per_body[body] += inertia(model, body)
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    head: dict[str, Any] = {
        "bodies": [],
        "floor": floor,
        "root": int(model.jnt_bodyid[free[0]]) if free.size else 0,
        "extent": float(model.stat.extent),
        "centre": model.stat.center.tolist(),
    }
    lists = [np.concatenate(v) if v else np.zeros(0, VERTEX) for v in per_body]
    first = 0
    for body, vertices in enumerate(lists):
        name = model.body(body).name
        head["bodies"].append({"name": name, "first": first, "count": len(vertices)})
        first += len(vertices)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 4)
    return struct.pack("<I", len(text)) + text + np.concatenate(lists).tobytes()


def geom_rgba(model: mujoco.MjModel, i: int) -> np.ndarray:
    material = model.geom_matid[i]
    return model.mat_rgba[material] if material >= 0 else model.geom_rgba[i]


def geom_triangles(model: mujoco.MjModel, i: int, coarse: dict[int, Triangles]) -> Triangles | None:
    """A geom in its own frame; None for what has no surface here."""
    kind, size = mujoco.mjtGeom(model.geom_type[i]), model.geom_size[i]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        return coarse.get(int(model.geom_dataid[i]))
    if kind == mujoco.mjtGeom.mjGEOM_HFIELD:
        return hfield(model, int(model.geom_dataid[i]))
    if kind == mujoco.mjtGeom.mjGEOM_BOX:
        return box(size)
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        return round_shape(np.repeat(size[:1], 3), 0.0)
    if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID:
        return round_shape(size, 0.0)
    if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        return round_shape(np.repeat(size[:1], 3), size[1])
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        return cylinder(size[0], size[1])
    return None


def place(shape: Triangles, pos: np.ndarray, quat: np.ndarray, rgba: np.ndarray) -> np.ndarray:
    """The corners of a shape in its body's frame, with normals and one colour: [3 F]."""
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, np.asarray(quat, float))
    turn = matrix.reshape(3, 3).T
    normals = corner_normals(shape) if shape.normals is None else shape.normals
    out = np.zeros(3 * len(shape.faces), VERTEX)
    out["position"] = (shape.vertices @ turn + pos)[shape.faces].reshape(-1, 3)
    out["normal"][:, :3] = np.round(127 * normals @ turn)
    out["colour"] = np.round(255 * np.clip(rgba, 0, 1))
    return out


def corner_normals(shape: Triangles) -> np.ndarray:
    """Smooth over round surfaces, one per face at sharp edges: [3 F, 3]."""
    areas = face_areas(shape)
    flat = unit(areas)
    smooth = vertex_normals(shape, areas)[shape.faces]  # [F, 3, 3]
    gentle = np.sum(smooth * flat[:, None], axis=2, keepdims=True) > CREASE
    return np.where(gentle, smooth, flat[:, None]).reshape(-1, 3)


def face_areas(shape: Triangles) -> np.ndarray:
    """The faces' normals, as long as twice their areas: [F, 3]."""
    a, b, c = (shape.vertices[shape.faces[:, k]] for k in range(3))
    return np.cross(b - a, c - a)


def vertex_normals(shape: Triangles, areas: np.ndarray) -> np.ndarray:
    """The mean normal of the faces around each vertex: [V, 3]."""
    index, weights = shape.faces.reshape(-1), np.repeat(areas, 3, axis=0)
    num = len(shape.vertices)
    total = [np.bincount(index, weights=weights[:, k], minlength=num) for k in range(3)]
    return unit(np.stack(total, axis=1))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


# --- shapes -------------------------------------------------------------------------------------


def coarse_meshes(model: mujoco.MjModel, most: int = MOST_FACES) -> dict[int, Triangles]:
    """Every mesh of a model, with `most` faces in all or not many more."""
    meshes = {}
    for i in range(model.nmesh):
        v, f = model.mesh_vertadr[i], model.mesh_faceadr[i]
        vertices = model.mesh_vert[v : v + model.mesh_vertnum[i]].astype(float)
        faces = model.mesh_face[f : f + model.mesh_facenum[i]]
        meshes[i] = Triangles(vertices, faces)
    cell, found = 0.004, meshes  # metres
    while sum(len(m.faces) for m in found.values()) > most and cell < 0.1:
        found = {i: simplify(mesh, cell) for i, mesh in meshes.items()}
        cell *= 2
    return found


def simplify(mesh: Triangles, cell: float) -> Triangles:
    """Vertices that share a cube of side `cell` become one, faces without an area are dropped.

    The two sides of a thin wall stay apart, since vertices are joined only where the surface faces
    the same way; normals are means over the fine mesh, so the coarse one is shaded as finely.
    """
    areas = face_areas(mesh)
    facing = vertex_normals(mesh, areas) > 0
    cubes = np.floor(mesh.vertices / cell).astype(np.int64)
    vertices, index = group(one_key(*cubes.T, *facing.T), mesh.vertices)
    vertices /= np.bincount(index)[:, None]
    corners = index[mesh.faces]  # [F, 3]
    side = np.argmax(np.abs(areas), axis=1)
    side = 2 * side + (np.take_along_axis(areas, side[:, None], axis=1)[:, 0] > 0)
    per_corner = np.repeat(areas, 3, axis=0)
    normals, which = group(one_key(corners.reshape(-1), np.repeat(side, 3)), per_corner)
    a, b, c = corners.T
    whole = np.flatnonzero((a != b) & (b != c) & (a != c))
    _, first = np.unique(one_key(*np.sort(corners[whole], axis=1).T), return_index=True)
    kept = whole[np.sort(first)]
    return Triangles(
        vertices, corners[kept], unit(normals)[which.reshape(-1, 3)[kept]].reshape(-1, 3)
    )


def one_key(*columns: np.ndarray) -> np.ndarray:
    """Rows of integers as single ones, each its own: [N]."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        column = column.astype(np.int64)
        low, high = (column.min(), column.max()) if column.size else (0, 0)
        key = key * (high - low + 1) + column - low
    return key


def group(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the values that have the same key [G, 3], and the group of each: [N]."""
    _, index = np.unique(keys, return_inverse=True)
    sums = [np.bincount(index, weights=values[:, k]) for k in range(3)]
    return np.stack(sums, axis=1), index


def box(half: np.ndarray) -> Triangles:
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
    quads = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    faces = [face for a, b, c, d in quads for face in ((a, b, c), (a, c, d))]
    return Triangles(corners * half, np.array(faces))


def rings(radii: np.ndarray, heights: np.ndarray, around: int = 24) -> Triangles:
    """A surface of revolution about z, from its top to its bottom."""
    angle = 2 * np.pi * np.arange(around) / around
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    parts = [np.c_[r * circle, np.full(around, h)] for r, h in zip(radii, heights, strict=True)]
    faces = []
    for ring in range(len(radii) - 1):
        for k in range(around):
            a, b = ring * around + k, ring * around + (k + 1) % around
            faces += [(a, a + around, b), (b, a + around, b + around)]
    return Triangles(np.concatenate(parts), np.array(faces))


def round_shape(radii: np.ndarray, half: float) -> Triangles:
    """A sphere, an ellipsoid, or (with half a length) a capsule along z."""
    angle = np.linspace(1e-3, np.pi - 1e-3, 14)  # an even number: no ring at the equator
    made = rings(np.sin(angle), np.cos(angle))
    along = np.where(made.vertices[:, 2:] > 0, half, -half) * np.array([0, 0, 1])
    return Triangles(made.vertices * radii + along, made.faces)


def cylinder(radius: float, half: float) -> Triangles:
    r = np.array([1e-4, radius, radius, 1e-4])
    return rings(r, np.array([half, half, -half, -half]))


def hfield(model: mujoco.MjModel, i: int) -> Triangles:
    """Uneven ground, at most GRID points along each side."""
    rows, columns, start = model.hfield_nrow[i], model.hfield_ncol[i], model.hfield_adr[i]
    heights = model.hfield_data[start : start + rows * columns].reshape(rows, columns)
    x, y, top, _ = model.hfield_size[i]
    r = np.unique(np.linspace(0, rows - 1, min(rows, GRID)).round().astype(int))
    c = np.unique(np.linspace(0, columns - 1, min(columns, GRID)).round().astype(int))
    ys, xs = y * (2 * r / (rows - 1) - 1), x * (2 * c / (columns - 1) - 1)
    grid = np.stack([*np.meshgrid(xs, ys), top * heights[np.ix_(r, c)]], axis=2)
    a = (np.arange(len(r) - 1)[:, None] * len(c) + np.arange(len(c) - 1)).reshape(-1)
    faces = np.concatenate([np.c_[a, a + 1, a + len(c)], np.c_[a + 1, a + len(c) + 1, a + len(c)]])
    return Triangles(grid.reshape(-1, 3), faces)


def inertia(model: mujoco.MjModel, body: int) -> list[np.ndarray]:
    """The even ellipsoid that has a body's mass and inertia."""
    mass, moments = model.body_mass[body], model.body_inertia[body]
    if mass <= 0:
        return []
    squares = 2.5 / mass * (moments.sum() - 2 * moments)
    shape = round_shape(np.sqrt(np.maximum(squares, 1e-6)), 0.0)
    grey = np.array([0.55, 0.6, 0.68, 1.0])
    return [place(shape, model.body_ipos[body], model.body_iquat[body], grey)]
