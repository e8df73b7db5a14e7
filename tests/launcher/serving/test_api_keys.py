"""Where the server's keys come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.coordinator.errors import InputError
from paceline.launcher.serving.listener import api_keys


def test_keys_of_the_file_and_of_the_environment_all_count(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of staging\none\n\n two \n # three\n")
    assert api_keys(path, {}) == ("one", "two")
    assert api_keys(None, {"PACELINE_API_KEYS": "three, four"}) == ("three", "four")
    assert api_keys(path, {"PACELINE_API_KEYS": "three"}) == ("one", "two", "three")
    assert api_keys(None, {}) == ()


@pytest.mark.parametrize("value", ["", " , ", "schlüssel"])
def test_a_variable_without_a_usable_key_does_not_open_the_server(value: str) -> None:
    with pytest.raises(InputError, match="PACELINE_API_KEYS must hold keys"):
        api_keys(None, {"PACELINE_API_KEYS": value})


@pytest.mark.parametrize(
    ("content", "message"), [("\n \n", "holds no key"), ("# one\n", "holds no key"), ("schlüssel\n", "ASCII")]
)
def test_a_file_without_a_usable_key_does_not_open_the_server(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        api_keys(path, {})
