"""The JSON documents that commands print with --json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from nsa_tune.db.text_table import content_of

if TYPE_CHECKING:
    from nsa_tune.autotune.health.doctor import Diagnosis
    from nsa_tune.autotune.probe.run import Probed
    from nsa_tune.autotune.probe.tries import Try
    from nsa_tune.autotune.runner.run import RunResult
    from nsa_tune.backend.dispatch.dispatcher import Dispatcher
    from nsa_tune.backend.dispatch.plan import Plan, Reason
    from nsa_tune.backend.types.records import Table

__all__ = [
    "as_text",
    "decisions",
    "of_db_list",
    "of_db_merge",
    "of_doctor",
    "of_explain",
    "of_lookup",
    "of_probe",
    "of_run",
    "run_counts",
]


def as_text(document: Mapping[str, Any]) -> str:
    """A document as one line of JSON."""
    return json.dumps(document, ensure_ascii=False)


def decisions(plan: Plan) -> dict[str, str | bool | None]:
    """The fields of `plan` that are decisions, by name."""
    names = [one.name for one in fields(plan) if not one.name.startswith("_")]
    return {name: getattr(plan, name) for name in names if name != "batch"}


def of_lookup(dispatcher: Dispatcher, plan: Plan) -> dict[str, Any]:
    """The document of `lookup`."""
    return {
        "schema": "nsa-tune/lookup/1",
        "batch": str(plan.batch),
        "tuned": dispatcher.table is not None,
        "source": dispatcher.source,
        "layers": dispatcher.setting.sharing,
        "plan": decisions(plan),
    }


def of_explain(dispatcher: Dispatcher, plan: Plan) -> dict[str, Any]:
    """The document of `explain`: that of `lookup`, with the reason of every decision."""
    return {
        **of_lookup(dispatcher, plan),
        "schema": "nsa-tune/explain/2",
        "key": None if dispatcher.table is None else dispatcher.table.key.as_document(),
        "reasons": {name: _reason(reason) for name, reason in plan.reasons.items()},
    }


def _reason(reason: Reason) -> dict[str, Any]:
    return {
        "verdict": str(reason.verdict),
        "source": reason.source,
        "estimates_us": dict(reason.estimates_us),
        "intervals_us": {name: list(ends) for name, ends in reason.intervals_us.items()},
        "guards": dict(reason.guards),
        "text": reason.text,
        "expected_regret": reason.expected_regret,
        "to_win": dict(reason.to_win),
        "rows": [row._asdict() for row in reason.rows],
        "consulted": [guard._asdict() for guard in reason.consulted],
    }


def run_counts(result: RunResult) -> dict[str, Any]:
    """The counts of a run."""
    return {
        "measured": result.measured,
        "skipped": result.skipped,
        "failed": result.failed,
        "quarantined": [asdict(arm) for arm in result.quarantined],
        "workers_replaced": result.replaced,
        "devices_lost": result.lost,
        "seconds": round(result.seconds, 1),
        "expected_regret": dict(result.expected_regret),
        "left_out": {name: asdict(one) for name, one in result.left_out.items()},
        "units": [{**asdict(unit), "out_of_line": unit.out_of_line} for unit in result.units],
        "spreads": [asdict(one) for one in result.spreads],
    }


def of_run(
    result: RunResult, database: str, sections: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The document of `run`; `sections` are those of its report document.

    A run on GPUs of several models makes a table for each; the fields of the first one are also on
    top.
    """
    tables = [_tuned(section) for section in sections]
    return {
        "schema": "nsa-tune/run/2",
        "outcome": result.outcome,
        **run_counts(result),
        "database": database,
        **tables[0],
        "tables": tables,
    }


def _tuned(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "key": section["key"],
        "crossovers": [
            {"question": question["question"], **line}
            for point in section["points"]
            for question in point["questions"]
            for line in question["lines"]
        ],
        "failures": section["failures"],
    }


def of_probe(found: list[Probed], database: str) -> dict[str, Any]:
    """The document of `probe`."""
    return {
        "schema": "nsa-tune/probe/1",
        "database": database,
        "limits": [
            {
                "name": one.name,
                "limit": one.found.limit,
                "formula": one.formula,
                "past": None if one.found.past is None else _tried(one.found.past),
                "ns_per_row": one.ns_per_row,
                "tries": [_tried(each) for each in one.found.tries],
            }
            for one in found
        ],
    }


def _tried(one: Try) -> dict[str, Any]:
    return {"size": one.size, "outcome": str(one.outcome), "words": one.words}


def of_doctor(diagnosis: Diagnosis) -> dict[str, Any]:
    """The document of `doctor`."""
    return {
        "schema": "nsa-tune/doctor/1",
        "fit": diagnosis.fit,
        "conclusion": diagnosis.conclusion,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }


def of_db_list(database: str, tables: list[Table]) -> dict[str, Any]:
    """The document of `db list`."""
    return {
        "schema": "nsa-tune/db-list/1",
        "database": database,
        "tables": [
            {
                "digest": table.key.digest,
                "key": table.key.as_document(),
                "measurements": len(table.measurements),
                "measured_at": table.measured_at,
            }
            for table in tables
        ],
    }


def of_db_merge(database: str, added: int, known: int, tables: list[Table]) -> dict[str, Any]:
    """The document of `db merge`."""
    return {
        "schema": "nsa-tune/db-merge/1",
        "database": database,
        "added": added,
        "known": known,
        "tables": [
            {
                "digest": table.key.digest,
                "key": table.key.as_document(),
                "content": content_of(table),
                "measurements": len(table.measurements),
                "measured_at": table.measured_at,
            }
            for table in tables
        ],
    }
