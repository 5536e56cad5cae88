"""What Prometheus reads: requests as they come, and what the service holds when it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
_HELD = {
    "tables": "Tables.",
    "measurements": "Measurements, older ones too.",
    "doubtful_tables": "Doubted tables.",
    "workers": "Workers that asked within a week.",
    "database_bytes": "Size of the database with the tables.",
}


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "nsa_tune_requests", "Requests answered.", ["method", "route", "status"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "nsa_tune_request_seconds", "Time to the first byte of an answer.", ["route"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.rows = Counter(
            "nsa_tune_uploaded_rows", "Rows of uploaded tables.", ["outcome"], registry=registry
        )
        self._asked = Lock()
        self._jobs = Gauge("nsa_tune_jobs", "Jobs by state.", ["state"], registry=registry)
        self._held = {
            name: Gauge(f"nsa_tune_{name}", text, registry=registry) for name, text in _HELD.items()
        }

    def text(self, jobs: Mapping[str, int], **held: int) -> bytes:
        """Everything in Prometheus' text format; `jobs` by state, and what is `held` now."""
        with self._asked:
            self._jobs.clear()
            for state, count in jobs.items():
                self._jobs.labels(state).set(count)
            for name, count in held.items():
                self._held[name].set(count)
            return generate_latest(self._registry)
