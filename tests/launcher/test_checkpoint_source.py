"""A model's name leads to a folder, or to one line that says what to change.

The hub is a server on this machine that answers as huggingface.co does; the client is the real one, in a process of its
own because it reads its settings when imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.coordinator.errors import InputError
from paceline.launcher.checkpoint_source import resolve_checkpoint

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the weights again",
    "original/params.json": b"{}",
    "README.md": b"# Model",
}

RESOLVE = """
import sys
from paceline.coordinator.errors import InputError
from paceline.launcher.checkpoint_source import resolve_checkpoint
try:
    print(resolve_checkpoint(sys.argv[1], revision=(sys.argv[2:] or [None])[0]))
except InputError as error:
    print("InputError:", error)
"""


@dataclass
class Hub:
    """A server with the models tiny/llama, tiny/gated (no access) and tiny/pickled (no safetensors), and a client."""

    cache: Path
    endpoint: str
    served: list[str] = field(default_factory=list)

    def resolve(self, *arguments: str, **settings: str) -> str:
        """What the client prints for resolve_checkpoint(*arguments) in a fresh process."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **settings}
        client = subprocess.run(
            [sys.executable, "-c", RESOLVE, *arguments], env=environment, capture_output=True, text=True, timeout=240
        )
        assert client.returncode == 0, client.stderr
        return client.stdout.rstrip("\n")


class HubHandler(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses."""

    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:6] in (["revision", "main"], ["revision", COMMIT]):
            self.give_listing(parts[3], tree=False)
        elif parts[:2] == ["api", "models"] and len(parts) > 4 and parts[4] == "tree":
            self.give_listing(parts[3], tree=True)
        elif parts[:2] == ["api", "models"] and parts[3] == "llama":
            self.give(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        elif parts[:2] == ["api", "models"]:
            self.give(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        elif parts[2:3] == ["resolve"]:
            self.give_file("/".join(parts[4:]))
        else:
            self.give(404, {}, b"")

    def give_listing(self, name: str, tree: bool) -> None:
        if name not in ("llama", "pickled"):
            gated = name == "gated"
            self.give(403 if gated else 404, {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound"}, b"{}")
            return
        names = [file for file in FILES if name == "llama" or not file.endswith(".safetensors")]
        if tree:
            listing: Any = [
                {"type": "file", "path": file, "size": len(FILES[file]), "oid": hashlib.sha1(FILES[file]).hexdigest()}
                for file in names
            ]
        else:
            listing = {"id": f"tiny/{name}", "sha": COMMIT, "siblings": [{"rfilename": file} for file in names]}
        self.give(200, {"Content-Type": "application/json"}, json.dumps(listing).encode())

    def give_file(self, name: str) -> None:
        if self.command == "GET":
            self.hub.served.append(name)
        tag = hashlib.sha1(FILES[name]).hexdigest()
        self.give(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}, FILES[name])

    def give(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not shown."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    HubHandler.hub = Hub(tmp_path / "hf", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield HubHandler.hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", [None, "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_the_default_model_has_a_name(made_model: Any, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(made_model.cache))
    assert resolve_checkpoint(name) == made_model.folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "my model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_checkpoint(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/my model") == Path("org/my model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/org/my model") == folder


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))


def test_a_folder_whose_path_is_no_utf8_is_to_be_renamed(tmp_path: Path) -> None:
    """What reads weights and tokenizers opens no such path, and says only that there is nothing."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError) as error:
        resolve_checkpoint(str(folder))
    message = str(error.value)
    assert message.startswith(f"the folder '{tmp_path}/bad\\udcff' cannot be read: its path is no UTF-8")
    assert message.endswith("; rename it")


@pytest.mark.parametrize(
    "name", ["", "gpt", "./org/name", "/no/such/folder", "../name", "~no-such-user/x", "org/name/more", "a/"]
)
def test_what_is_neither_folder_nor_hub_id_never_asks_the_hub(name: str) -> None:
    with pytest.raises(InputError, match="not a folder on this machine, nor a Hugging Face id"):
        resolve_checkpoint(name)


def test_a_revision_needs_the_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in (None, str(tmp_path)):
        with pytest.raises(InputError, match="drop the revision"):
            resolve_checkpoint(model, revision="main")


def test_a_hub_model_is_fetched_once_and_without_pickles(hub: Hub) -> None:
    folder = Path(hub.resolve("tiny/llama"))
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == wanted
    assert sorted(hub.served) == wanted
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.resolve("tiny/llama", COMMIT) == str(folder)
    assert hub.resolve("tiny/llama", HF_HUB_OFFLINE="1") == str(folder)
    assert hub.resolve("tiny/llama", HF_ENDPOINT="http://127.0.0.1:9") == str(folder)
    assert len(hub.served) == len(wanted)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["tiny/missing"], {}, "no model tiny/missing, or it is private; check the name"),
        (["tiny/gated"], {}, "tiny/gated is gated: accept its licence"),
        (["tiny/llama", "v9"], {}, "tiny/llama has no revision 'v9'"),
        (["tiny/pickled"], {}, "tiny/pickled has no *.safetensors weights"),
        (["tiny/ll*ma"], {}, "'tiny/ll*ma' is neither a folder on this machine nor a valid Hugging Face id"),
        (["tiny/llama"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it"),
        (["tiny/llama"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached; check the network"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: Hub, arguments: list[str], settings: dict[str, str], message: str) -> None:
    said = hub.resolve(*arguments, **settings)
    assert said.startswith("InputError: ")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "merges.txt", "a.jinja"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    """transformers, too, would open it and wait."""
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    (tmp_path / "folder.json").mkdir()
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is not a regular file but a pipe, socket or device; put the file in"):
        resolve_checkpoint(str(tmp_path))
