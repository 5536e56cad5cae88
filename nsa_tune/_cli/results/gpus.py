"""The command `gpus`: what was measured on which GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from nsa_tune._cli.shared.console import print_document, say, tables_console
from nsa_tune._cli.shared.gpus import full_name, keys_of
from nsa_tune._cli.shared.options import AsJson, Database
from nsa_tune.backend.hardware import detect
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.formats.terminal import print_tables
from nsa_tune.reports.traffic.engine_passes import shipped_passes

_COLUMNS = ("GPU", "model", "KV pool", "local heads with a table", "with whole passes")


class _Measured(NamedTuple):
    """What was measured on one GPU, of one model and format of the KV pool."""

    gpu: str
    model: str
    kv_dtype: str
    heads: list[int]
    """Local heads with a table: times of each kernel."""
    passes: list[int]
    """Local heads for which times of whole passes in an engine ship, too."""


def gpus(
    gpu: Annotated[
        str | None,
        typer.Argument(metavar="[GPU]", help="Only this GPU: H200, H100 PCIe.", show_default=False),
    ] = None,
    database: Database = None,
    json: AsJson = False,
) -> None:
    """List the GPUs that are known, and the models, heads and KV formats measured on each.

    A table holds times of kernels. Where there are whole passes, too, `advise` and `replay` price
    times to first token.
    """
    rows = list(_measured(database))
    if gpu is not None:
        gpu = full_name(gpu, database)
        rows = [row for row in rows if row.gpu == gpu]
    names = [gpu] if gpu else [name for name in detect.KNOWN if name not in {r.gpu for r in rows}]
    if json:
        document = {"schema": "nsa-tune/gpus/1", "measured": [row._asdict() for row in rows]}
        print_document({**document, "known": [*detect.KNOWN]})
        return
    if rows:
        cells = tuple((*row[:3], *(_listed(heads) for heads in row[3:])) for row in rows)
        table = DisplayTable("Local heads: the model's heads divided by --tp", _COLUMNS, cells)
        print_tables("Measured GPUs", [table], tables_console())
    others = defaultdict[str, list[str]](list)
    for name in names if not (gpu and rows) else ():
        others[_instead(name, database)].append(name)
    for instead, known in others.items():
        typer.echo(plain(f"Not measured: {', '.join(known)}. {instead}"))
    if rows:
        if any(row.model.startswith("deepseek-v4") for row in rows):
            say("DeepSeek V4's tables are for reports: the plug-ins and `advise` leave it alone.")
        row = max(rows, key=lambda row: len(row.heads))
        key = f'--gpu "{row.gpu}" --model {row.model} --heads {(row.passes or row.heads)[0]}'
        key = f"{key} --kv-dtype {row.kv_dtype}"
        say(plain(f"A table is shown by: nsa-tune report {key}"))
        say(plain(f"and answers for a batch: nsa-tune lookup {key} extend:1920+128"))
        say("An engine with the plug-in loads its own, GLM-5.2 those of glm-5, other heads none.")
        say("`nsa-tune advise` says which flags to set.")


def _measured(database: Path | None) -> Iterator[_Measured]:
    heads = defaultdict[tuple[str, str, str], set[int]](set)
    for key in keys_of(database):
        kv_dtype = "bf16" if key.kv_layout == "bf16" else "fp8"
        heads[key.gpu, key.model, kv_dtype].add(key.heads)
    for (gpu, model, kv_dtype), local in sorted(heads.items()):
        named = {"gpu": gpu, "model": model, "kv_dtype": kv_dtype}
        passes = {p.key["heads"] for p in shipped_passes() if named.items() <= p.key.items()}
        yield _Measured(gpu, model, kv_dtype, sorted(local), sorted(passes))


def _instead(gpu: str, database: Path | None) -> str:
    """What stands for the times of a known GPU without tables."""
    arch = detect.KNOWN[gpu].arch if gpu in detect.KNOWN else ""
    keys = [key for key in keys_of(database) if key.gpu in detect.KNOWN]
    alike = list(dict.fromkeys(key.gpu for key in keys if detect.KNOWN[key.gpu].arch == arch))
    run = "Measure first: `nsa-tune run` on it."
    if alike:
        return (
            f"{run} Until then `advise`, `replay` and `lookup` show times of {alike[0]}"
            f"{''.join(f', or where that has no table {name}' for name in alike[1:])}, of the same "
            f"architecture ({arch}), which may be several times off; no plug-in takes them: "
            "SGLang's then does only what a start of the engine proves, vLLM's nothing."
        )
    return f"{run} Until then `advise` has no answer, as no other GPU's times stand for it."


def _listed(heads: list[int]) -> str:
    return ", ".join(map(str, heads)) or "-"
