"""The commands that set tables against each other, draw them and serve them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import cli
from nsa_tune._cli.shared.options import share_of
from nsa_tune._errors import UsageError
from nsa_tune.db.exchange import write_text
from tests.reports.synthetic import real_table


def run(captured: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command in this process."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert isinstance(left.value.code, int)
    return (left.value.code, *captured.readouterr())


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, str, str]:
    """A table, the same with one arm a tenth slower, and the first as of another GPU."""
    first = real_table(points=("indexer_layout",))
    slower = real_table(
        points=("indexer_layout",), scale=lambda arm, batch: 1.1 if arm.startswith("flat") else 1.0
    )
    elsewhere = replace(first, key=replace(first.key, gpu="NVIDIA H200"))
    paths = [tmp_path / f"{name}.tsv" for name in ("first", "slower", "elsewhere")]
    for table, path in zip((first, slower, elsewhere), paths, strict=True):
        write_text(table, path)
    one, two, three = map(str, paths)
    return one, two, three


def test_a_regression_ends_with_4_and_is_named(
    sides: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "compare", sides[0], sides[1], "--fail-on", "5%")

    assert code == 4
    assert "regressions of more than 5 %" in out
    assert "flatten/deep_gemm takes 1.100x as long, in the mean of its cells" in err


@pytest.mark.parametrize("limit", [[], ["--fail-on", "15%"]])
def test_less_than_the_limit_or_no_limit_is_no_regression(
    sides: tuple[str, str, str], capsys: pytest.CaptureFixture[str], limit: list[str]
) -> None:
    code, out, _ = run(capsys, "compare", sides[0], sides[1], *limit)

    assert code == 0
    assert " slower" in out


def test_different_gpus_are_compared_only_when_asked(
    sides: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused, _, err = run(capsys, "compare", sides[0], sides[2])
    asked, out, _ = run(capsys, "compare", sides[0], sides[2], "--across-gpus", "--json")

    assert refused == 2
    assert "compare them with --across-gpus" in err
    assert asked == 0
    document = json.loads(out)
    assert document["schema"] == "nsa-tune/compare/3"
    assert {"field": "gpu", "before": "NVIDIA H100 80GB HBM3", "after": "NVIDIA H200"} in (
        document["comparisons"][0]["differences"]
    )


@pytest.mark.parametrize("text", ["fast", "100%", "-1%", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        share_of("--fail-on", text)


def test_a_share_is_written_either_way() -> None:
    assert share_of("--fail-on", "5%") == share_of("--fail-on", " 0.05 ") == 0.05


def test_the_dashboard_refuses_a_file_that_is_not_there(
    sides: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    missing = tmp_path / "none.db"

    code, out, err = run(capsys, "dashboard", sides[0], str(missing), "--port", "0")

    assert (code, out) == (1, "")
    assert err == (
        f"nsa-tune: there is no file {missing}; give another one, or measure one with "
        "`nsa-tune run`\n"
    )


def test_the_dashboard_says_that_the_default_database_does_not_exist_yet(
    clean_environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = pytest.importorskip("nsa_tune.reports.dashboard.server")
    served: list[list[Path]] = []
    monkeypatch.setattr(server, "serve", lambda paths, **_: served.append(paths))

    code, _, err = run(capsys, "dashboard")

    database = clean_environment / ".local/share/nsa-tune/nsa-tune.db"
    assert (code, served) == (0, [[database]])
    assert f"{database} does not exist yet" in err


def test_pictures_are_written_into_a_directory_and_one_into_a_file(
    sides: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    database = str(tmp_path / "some.db")
    assert run(capsys, "db", "import", sides[0], "--db", database)[0] == 0
    asked = ("report", "--db", database, "--format", "svg")

    many, _, said = run(capsys, *asked, "--out", str(tmp_path / "charts"))
    one, _, _ = run(capsys, *asked, "--chart", "*overview", "--out", str(tmp_path / "one.svg"))
    unknown, _, err = run(capsys, *asked, "--chart", "pie", "--out", str(tmp_path / "pie.svg"))

    assert (many, one, unknown) == (0, 0, 2)
    assert "wrote 1 picture" in said
    assert len(list((tmp_path / "charts").glob("*.svg"))) == 1
    assert "prefers-color-scheme:dark" in (tmp_path / "one.svg").read_text()
    assert "unknown chart 'pie'" in err
