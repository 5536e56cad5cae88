"""Why jobs are proposed: a table that somebody asked for is not there, a driver or a library has
changed, or a sentinel found that a table no longer holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Key
from nsa_tune.fleet.service.documents import libraries_in, text_in
from nsa_tune.fleet.service.jobs.job import Job, Worker
from nsa_tune.fleet.service.jobs.queue import Jobs, TooManyJobs
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.state import State

_LONGEST_FINDING = 2**14
"""Bytes of one, as JSON."""
_MOST_FINDINGS, _MOST_FINDINGS_BY_TOKEN = 10_000, 1000
"""That are not settled."""


class Demand:
    """Turns what hosts say into proposals."""

    def __init__(self, state: State, jobs: Jobs) -> None:
        self._state = state
        self._jobs = jobs

    def wanted(self, target: Target, keys: Sequence[Key], by: str) -> tuple[str, Job | None]:
        """The digest of the table that `target` asks for, or "" and the job that will make it.

        Where there is no table at all, any driver and libraries will do; otherwise those asked for.
        """
        digest = next((key.digest for key in keys if target.met_by(key)), "")
        if digest:
            return digest, None
        reason = target.lacking(keys)
        if not any(target.name == Target.of_key(key).name for key in keys):
            target = Target(*target.name)
        return "", self._jobs.propose(target, f"{reason}, and {by} asked for it", by=by)

    def arrived(self, worker: Worker, keys: Sequence[Key], by: str) -> list[Job]:
        """Proposals for what is known of this worker's GPU, but not with its driver and libraries.

        `by` is the worker's token. Nothing for a worker that was here before, and looked the same.
        """
        if self._jobs.worker(worker.name) == worker:
            return []
        names = {Target.of_key(key).name for key in keys if key.gpu == worker.gpu}
        jobs = []
        for name in sorted(names):
            target = Target(*name, worker.driver, worker.libraries)
            reason = target.lacking(keys)
            if reason:
                reason = f"{reason}, and {worker.name} has them"
                # A token that has proposed too much may still take jobs.
                with suppress(TooManyJobs):
                    jobs.append(self._jobs.propose(target, reason, by=by))
        return jobs

    def found(self, document: Mapping[str, Any], keys: Sequence[Key], by: str) -> Job:
        """Doubt a table from now on, and propose to measure the point of it again.

        `document` is what a sentinel reports: `key`, a digest or an object with a key's fields,
        `point`, and whatever else. With `driver` and `libraries` it says where it was found; the
        point is measured with those then, and otherwise with those of the table.

        Raises:
            UsageError: when it is none.
            NoTunedData: when there is no such table.
        """
        point, key = text_in(document, "point"), _key_of(document.get("key"), keys)
        points_for(profile_of(key.model), [point])
        there = Target.of_key(key)
        target = replace(
            there,
            driver=text_in(document, "driver", there.driver),
            libraries=libraries_in(document) or there.libraries,
        )
        text = json.dumps(document, sort_keys=True)
        if len(text) > _LONGEST_FINDING:
            raise UsageError(f"a finding has at most {_LONGEST_FINDING} bytes")
        with self._state.writing() as connection:
            count, of_token = connection.execute(
                "SELECT count(*), count(CASE WHEN found_by = ? THEN 1 END) FROM findings "
                "WHERE settled IS NULL",
                [by],
            ).fetchone()
            # The same one again says nothing new, and neither does one of too many.
            same = connection.execute(
                "SELECT 1 FROM findings WHERE digest = ? AND document = ? AND settled IS NULL",
                [key.digest, text],
            ).fetchone()
            if not same and count < _MOST_FINDINGS and of_token < _MOST_FINDINGS_BY_TOKEN:
                connection.execute(
                    "INSERT INTO findings (digest, point, document, found_by, found) "
                    "VALUES (?, ?, ?, ?, ?)",
                    [key.digest, point, text, by, time.time()],
                )
        return self._jobs.propose(
            target, f"{by} found that {point} no longer holds", by=by,
            points=[point], digest=key.digest,
        )  # fmt: skip

    def doubtful(self) -> dict[str, list[str]]:
        """By digest, the points of its table that are doubted."""
        with self._state.reading() as connection:
            rows = connection.execute(
                "SELECT DISTINCT digest, point FROM findings WHERE settled IS NULL "
                "ORDER BY digest, point"
            ).fetchall()
        points: dict[str, list[str]] = {}
        for digest, point in rows:
            points.setdefault(digest, []).append(point)
        return points


def _key_of(value: object, keys: Sequence[Key]) -> Key:
    """The one of `keys` that `value` names: a digest, or an object with the fields of a key."""
    if isinstance(value, str):
        named = [key for key in keys if key.digest == value]
    elif isinstance(value, dict):
        target = Target.of(value)
        named = [key for key in keys if target.met_by(key)]
        protocol = value.get("protocol")
        named = [key for key in named if protocol in (None, key.protocol)]
    else:
        raise UsageError("'key' must be a table's digest, or an object with the fields of its key")
    if not named:
        raise NoTunedData("there is no table of that key here; POST /v1/wanted asks for one")
    return named[-1]
