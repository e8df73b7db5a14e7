"""The rules that hold for every file: which folder may import which, what is never imported, how long a file may be."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "coordinator", "worker", "model", "kernels")
CODE = sorted(path for folder in ("api", *PACKAGES) for path in (ROOT / folder).rglob("*.py"))
ALL_CODE = sorted([*CODE, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])

# launcher -> coordinator -> (messages) <- worker -> model -> kernels; the launcher starts the workers.
MAY_IMPORT = {
    "api": {"launcher", "coordinator"},
    "launcher": {"launcher", "coordinator", "worker"},
    "coordinator": {"coordinator"},
    "worker": {"worker", "model", "kernels", "coordinator"},
    "model": {"model", "kernels"},
    "kernels": {"kernels"},
}
WORKER_MAY_KNOW = {"messages", "config", "errors", "channel", "wire"}
"""Of the coordinator: what passes between the two, not how it decides."""

COORDINATOR_LIBRARIES = {"msgpack", "xxhash"}
PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
PICKLING_CALLS = {
    *("send_pyobj", "recv_pyobj", "send_object_list", "recv_object_list"),
    *("broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object"),
}
MOST_LINES = 400


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, at any depth; names out of a package as package.name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield from (f"{dots}{node.module or ''}.{alias.name}" for alias in node.names)


def run_python(code: str, *, safe_path: bool = True) -> str:
    """Standard output of a fresh interpreter in the root of the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    if safe_path:
        environment["PYTHONSAFEPATH"] = "1"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_there_is_code_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in CODE} == {"api", *PACKAGES}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder: str) -> None:
    wrong = []
    for path in (path for path in CODE if path.relative_to(ROOT).parts[0] == folder):
        for name in imports(path):
            package, _, rest = name.partition(".")
            target, _, module = rest.partition(".")
            if package != "paceline" or target not in PACKAGES:
                continue
            secret = folder == "worker" and target == "coordinator" and module.split(".")[0] not in WORKER_MAY_KNOW
            if target not in MAY_IMPORT[folder] or secret:
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_internal_imports_are_spelled_in_full() -> None:
    own_names = {*PACKAGES, "api", "tests", ""}
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in ALL_CODE
        for name in imports(path)
        if name.split(".")[0] in own_names
    ]
    assert wrong == []


def test_the_coordinator_is_plain_python() -> None:
    allowed = {*sys.stdlib_module_names, *COORDINATOR_LIBRARIES, "paceline"}
    files = [path for path in CODE if path.relative_to(ROOT).parts[0] == "coordinator"]
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in files
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_importing_the_coordinator_loads_no_framework() -> None:
    modules = [f"paceline.coordinator.{path.stem}" for path in (ROOT / "coordinator").glob("*.py")]
    code = f"import sys, importlib; [importlib.import_module(name) for name in {modules}]; "
    assert run_python(code + "print({'torch', 'numpy', 'transformers'} & set(sys.modules))") == "set()\n"


def test_importing_paceline_loads_no_framework() -> None:
    names = "paceline.SamplingParams; paceline.structured_output.json_object(); dir(paceline)"
    code = f"import sys, paceline; {names}; print({{'torch', 'numpy'}} & set(sys.modules))"
    assert run_python(code) == "set()\n"


def test_only_who_reads_a_tokenizer_loads_transformers() -> None:
    code = "import sys, paceline.launcher.engine; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python(code) == "{'torch'}\n"


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    assert names - {name.split(".")[0] for path in CODE for name in imports(path)} == set()


def test_nothing_is_pickled() -> None:
    wrong = [
        f"{name_of(path)} imports {name}" for path in CODE for name in imports(path) if name.split(".")[0] in PICKLERS
    ]
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if node.attr in PICKLING_CALLS or text == "torch.load":
                    wrong.append(f"{name_of(path)} uses {text}")
    assert wrong == []


def test_package_markers_are_empty() -> None:
    assert [folder for folder in PACKAGES if (ROOT / folder / "__init__.py").read_bytes()] == []


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_CODE}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_transformers_survives_the_folder_called_kernels() -> None:
    # Without a safe path transformers finds kernels/ in the current folder and imports it as the package `kernels`.
    assert run_python("from transformers import AutoTokenizer, LlamaConfig; print('ok')", safe_path=False) == "ok\n"


def test_no_file_names_a_folder_of_this_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the git repository")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    # A folder of everybody's, as where a clone may lie for a while, says nothing about a machine.
    shared = {Path(tempfile.gettempdir()), Path("/tmp"), Path("/home"), Path("/")}
    folders = {str(folder) for folder in (Path.home(), ROOT.parent) if folder not in shared}
    pattern = re.compile("|".join(f"(?<![\\w.]){re.escape(folder)}(?!\\w)" for folder in folders))
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert [name_of(path) for path in files if pattern.search(path.read_text(encoding="utf-8", errors="ignore"))] == []
