"""The files of a model: found by reading its XML, never outside its folder, nothing run.

Every file that MuJoCo would open is named here first. So what lies elsewhere, is missing, or would
load a library is refused before MuJoCo sees any of it.
"""

from __future__ import annotations

import os
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import mujoco

from jaxtd3.errors import UserError

MAX_XML, MAX_ALL = 32 * 2**20, 2**30  # bytes
MAX_FILES = 5000
REFUSED = {
    "extension": "plugins load libraries",
    "plugin": "plugins load libraries",
    "model": "attached models are not followed: save it as one MJCF first (mj_saveLastXML)",
}


class Mjcf:
    """A model's main file, and all files that belong to it by their path in its folder."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise UserError(f"no such MJCF: {path}")
        self.folder, self.main = path.parent.resolve(), PurePosixPath(path.name)
        self.files: dict[PurePosixPath, bytes] = {}
        self.compiler: dict[str, str] = {}  # its settings; later ones win
        trees = self._read_xml(self.main, "--mjcf")
        folders = asset_folders(self.compiler)
        for where, tree in trees:
            for tag, line, name in asset_files(tree):
                self._take(PurePosixPath(folders[tag]) / name, f"{where}: <{tag} file={line!r}>")

    # --- files ----------------------------------------------------------------------------------

    def _read_xml(self, name: PurePosixPath, why: str) -> list[tuple[PurePosixPath, ET.Element]]:
        """The XML trees of a file and of all that it includes."""
        name = PurePosixPath(os.path.normpath(name))
        if name in self.files:
            return []
        text = self._take(name, why)
        if len(text) > MAX_XML:
            raise UserError(f"{name} has {len(text) / 2**20:.0f} MiB of XML: too much to read")
        if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
            raise UserError(f"{name} declares entities: MJCF needs none")
        try:
            tree = ET.fromstring(text)
        except ET.ParseError as error:
            raise UserError(f"{name} is not well-formed XML: {error}") from error
        if name == self.main and tree.tag != "mujoco":
            hint = ": convert the URDF to MJCF first" if tree.tag == "robot" else ""
            raise UserError(f"{name} is not MJCF: its root is <{tree.tag}>{hint}")
        trees = [(name, tree)]
        for element in tree.iter():
            if element.tag in REFUSED and (element.tag != "model" or "file" in element.attrib):
                raise UserError(f"{name}: <{element.tag}> is refused: {REFUSED[element.tag]}")
            if element.tag == "compiler":
                self.compiler |= element.attrib
            if element.tag == "include":
                inside = PurePosixPath(element.get("file", ""))
                trees += self._read_xml(inside, f"{name}: <include file={str(inside)!r}>")
        return trees

    def _take(self, name: PurePosixPath, why: str) -> bytes:
        """Read a file of the folder, once."""
        clean = PurePosixPath(os.path.normpath(name))
        try:
            real = (self.folder / clean).resolve()
            there = real.is_file()
        except (OSError, RuntimeError) as error:  # a name too long, a link to itself
            raise UserError(f"{why} cannot be read: {error}") from error
        if name.is_absolute() or ".." in clean.parts or not real.is_relative_to(self.folder):
            raise UserError(f"{why} lies outside the MJCF's folder: copy it there")
        if clean in self.files:
            return self.files[clean]
        if not there:
            raise UserError(f"{why}: no such file {clean} in {self.folder}")
        total = sum(map(len, self.files.values())) + real.stat().st_size
        if total > MAX_ALL or len(self.files) >= MAX_FILES:
            raise UserError(f"{why}: the model's files are more than {MAX_ALL / 2**30:.0f} GiB")
        self.files[clean] = real.read_bytes()
        return self.files[clean]

    # --- what they make -------------------------------------------------------------------------

    def write(self, folder: Path) -> Path:
        """Copy the files into a folder; the path of the main one."""
        for name, content in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return folder / self.main

    def compile(self) -> mujoco.MjModel:
        """The model, compiled from copies, so that nothing else is at hand."""
        with tempfile.TemporaryDirectory(prefix="jaxtd3-mjcf-") as folder:
            path = self.write(Path(folder))
            try:
                return mujoco.MjModel.from_xml_path(str(path))
            except (ValueError, RuntimeError, mujoco.FatalError) as error:  # too large, for one
                text = " ".join(str(error).replace(f"{folder}/", "").split())
                raise UserError(f"{self.main}: MuJoCo says: {text}") from error


def asset_folders(compiler: dict[str, str]) -> dict[str, str]:
    """Where the files of each kind of asset are, by the compiler's settings."""
    mesh = compiler.get("meshdir", compiler.get("assetdir", ""))
    texture = compiler.get("texturedir", compiler.get("assetdir", ""))
    return {**dict.fromkeys(ASSETS, mesh), "texture": texture}


ASSETS = ("mesh", "hfield", "skin", "flex", "flexcomp", "texture", "composite", "sdf")


def asset_files(tree: ET.Element) -> Iterator[tuple[str, str, PurePosixPath]]:
    """(tag, as written, path) of every file that an element names, other than includes."""
    for element in tree.iter():
        for key, value in element.attrib.items():
            if not key.startswith("file") or element.tag == "include" or not value:
                continue
            if element.tag not in ASSETS:
                raise UserError(f"<{element.tag} {key}={value!r}>: not known to be an asset")
            yield element.tag, value, PurePosixPath(value.replace("\\", "/"))
