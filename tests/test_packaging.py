"""What is installed is what is here."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import paceline

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_of_code_is_in_the_wheel() -> None:
    places = PROJECT["tool"]["setuptools"]["package-dir"]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(places)
    folders = ("api", "launcher", "coordinator", "worker", "model", "kernels")
    with_code = {path.parent for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {ROOT / place for place in places.values()} == with_code


def test_every_other_file_is_in_the_wheel_too() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    packed = {
        file
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for file in (ROOT / setuptools["package-dir"][package]).glob(pattern)
    }
    others = {path for place in setuptools["package-dir"].values() for path in (ROOT / place).rglob("*.*")}
    assert {path for path in others if path.suffix not in (".py", ".pyc")} == packed


def test_the_version_is_the_same_everywhere() -> None:
    assert paceline.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("paceline")


def test_the_command_runs_the_launcher() -> None:
    (script,) = importlib.metadata.distribution("paceline").entry_points.select(group="console_scripts")
    assert script.name == "paceline"
    assert callable(script.load())


def test_pins_lie_within_the_supported_ranges() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    # The dev extra takes others in by name, and is to need all that they do.
    wanted = [
        Requirement(text) for text in [*project["dependencies"], *extras["dev"], *extras["serve"], *extras["trace"]]
    ]
    included = [requirement for requirement in wanted if requirement.name == project["name"]]
    assert [requirement.extras for requirement in included] == [{"serve", "trace"}]
    for requirement in wanted:
        if requirement in included:
            continue
        assert requirement.specifier.contains(pins.pop(requirement.name)), requirement
    assert pins == {}
