"""Addresses in place of paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_tune import UsageError
from nsa_tune.remote.address import Address, address_in

PIN = "ab" * 32


@pytest.mark.parametrize(
    "text",
    ["nsa-tune.db", "/srv/https.db", "", "https", "ftp://a/b", "s3://a/b", "http:", "~/a.tsv"],
)
def test_paths_are_no_addresses(text: str) -> None:
    assert address_in(text) is None
    assert address_in(Path(text)) is None


@pytest.mark.parametrize("text", ["https://tables.example/v1/database", "HTTP://[::1]:80/a?b=c"])
def test_an_address_is_one_also_as_a_path(text: str) -> None:
    found = address_in(text)

    assert found == address_in(Path(text))
    assert found is not None
    assert found.url == text.replace("HTTP", "http")


@pytest.mark.parametrize("text", ["https://tables.example:8470", "https://tables.example:8470/"])
def test_without_a_path_it_is_a_services_database(text: str) -> None:
    found = Address.of(text)

    assert found.url == "https://tables.example:8470/v1/database"
    assert found.server == "https://tables.example:8470"


def test_a_query_is_sent_and_not_shown() -> None:
    found = Address.of(f"https://tables.example/a.db?signature=secret#sha256={PIN.upper()}")

    assert found.url == "https://tables.example/a.db?signature=secret"
    assert found.shown == "https://tables.example/a.db"
    assert found.sha256 == PIN


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("https://tables.example", False),
        ("http://tables.example", True),
        ("http://localhost:8470", False),
        ("http://127.0.0.1:8470", False),
        ("http://[::1]:8470", False),
    ],
)
def test_it_says_whether_others_can_read_along(text: str, *, readable: bool) -> None:
    assert Address.of(text).readable is readable


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("https://me:secret@tables.example", "put the token into NSA_TUNE_TOKEN"),
        ("https://tables.example:port", "the address of a database is wrong"),
        ("https://[::1", "the address of a database is wrong"),
        ("https://:8470", "is no address"),
        ("https://tables example", "is no address"),
        ("https://tables.example/a\n", "is no address"),
        ("https://tables.example/tables-\u00e4", "is no address"),
        ("https://tables.example#sha256=12", "means nothing"),
    ],
)
def test_a_wrong_address_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        Address.of(text)

    assert "secret" not in str(caught.value)
