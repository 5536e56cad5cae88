"""What Prometheus reads: requests as they come, and what the service holds when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class Holdings(NamedTuple):
    """What the service holds at one moment."""

    jobs: Mapping[str, int]
    """By state."""
    tables: int
    measurements: int
    doubtful: int
    """Tables that a sentinel doubts."""
    workers: int
    """That have ever asked for a job."""
    database_bytes: int


class Metrics:
    """Counters of one service."""

    def __init__(self, holdings: Callable[[], Holdings]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Holdings(holdings))
        self.requests = Counter(
            "nsa_tune_requests", "Requests answered.", ["method", "route", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "nsa_tune_request_seconds", "Time to the first byte of an answer.", ["route"],
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.rows = Counter(
            "nsa_tune_uploaded_rows", "Rows of uploaded tables.", ["outcome"],
            registry=self._registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """Everything in Prometheus' text format.

        Raises:
            StoreError: when a database cannot be read.
        """
        return generate_latest(self._registry)


class _Holdings(Collector):
    def __init__(self, holdings: Callable[[], Holdings]) -> None:
        self._holdings = holdings

    def describe(self) -> Iterator[Metric]:
        """Nothing: it would be collected when it is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        held = self._holdings()
        jobs = GaugeMetricFamily("nsa_tune_jobs", "Jobs by state.", labels=["state"])
        for state, count in sorted(held.jobs.items()):
            jobs.add_metric([state], count)
        yield jobs
        yield GaugeMetricFamily("nsa_tune_tables", "Tables.", held.tables)
        yield GaugeMetricFamily(
            "nsa_tune_measurements", "Measurements, older ones too.", held.measurements
        )
        yield GaugeMetricFamily("nsa_tune_doubtful_tables", "Doubted tables.", held.doubtful)
        yield GaugeMetricFamily("nsa_tune_workers", "Workers that ever asked.", held.workers)
        yield GaugeMetricFamily(
            "nsa_tune_database_bytes", "Size of the database with the tables.", held.database_bytes
        )
