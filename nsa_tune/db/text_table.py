"""The text form of one table: diffable, one row a measurement, read with the standard library.

    # format = nsa-tune-table 1
    # gpu = NVIDIA H100 80GB HBM3
    # ... the device's other facts, the key, and how many rows follow
    # content = DIGEST-OF-ALL-OTHER-LINES
    # library = torch 2.13.0
    # ages = AGExROWS AGExROWS ...
    point<TAB>batch<TAB>arm<TAB>status<TAB>latency_us<TAB>...

The line "# ages" says how many microseconds before the newest row (`measured_at`) each row was
measured, in their order: "0x3 2500000x2" are three rows and two. Without it that is not known.

Floats have 4 significant digits, "-" stands for nothing, and backslash escapes keep a text with
tabs or newlines in its cell. A table whose content is not what its head says is refused. One
without a line "# content", as somebody writes it by hand, is read as it is. Names in the head that
this version does not know, as "# weights" of earlier ones, are passed over.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby, takewhile
from math import inf
from pathlib import Path

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing, StoreNewer
from nsa_tune._files import TooLong, lines_of, open_regular, read_whole
from nsa_tune.backend.types.records import (
    Device,
    Key,
    Measurement,
    Status,
    Table,
)
from nsa_tune.db.values import number_of

LEAST_US, MOST_US = 1e-3, 1e9
"""Latencies outside are refused: no kernel takes a nanosecond, and none a quarter of an hour."""
MOST_ROWS = 2**16
"""Rows of one table; those that ship have 2,700 at most."""
_MOST_SEQUENCES = 2**22
"""Sequences in all batches of one table; those that ship have 63,000 at most. A batch keeps the
length of each, though "x" writes many in a few characters."""
_MOST_BYTES, _LONGEST_LINE = 2**24, 2**20
"""Of a file, and of one of its lines."""

_FORMAT, _VERSIONS = "nsa-tune-table", ("1", "2")
"""The second has what an arm takes once a pass."""
_DEVICE_NUMBERS = ("sms", "shared_memory_optin", "memory", "l2")
_COLUMNS = (
    "point", "batch", "arm", "status", "latency_us", "low_us", "high_us", "samples", "error",
    "reason",
)  # fmt: skip
_PASS = "pass_us"
_LIMIT = "limit "
_ROWS = "rows"
_AGES = "ages"
_CONTENT = "content"
_CONTENT_LINE = re.compile(rb"\n# content = ([^\n]*)(?=\n)")
_COUNTED = re.compile("x([0-9]{1,6})")
_NOTHING = "-"
_COUNT = re.compile("[0-9]{1,18}")
_AGE = re.compile("([0-9]{1,18})x([0-9]{1,9})")
_STATUSES = {str(status): status for status in Status}
_SPECIAL = re.compile(r"[\\\x00-\x1f\x7f\x85\u2028\u2029]")
_ESCAPED = re.compile(r"\\(?:u([0-9a-f]{4})|(.?))", re.DOTALL)
_ESCAPES = {"\n": "n", "\t": "t", "\r": "r", "\\": "\\"}
_UNESCAPES = {letter: character for character, letter in _ESCAPES.items()} | {"-": "-"}


def checked_measurement(
    point: object, batch: object, arm: object, status: object, latency_us: object,
    low_us: object, high_us: object, samples: object, error: object, reason: object,
    discarded: object = 0, pass_us: object = None,
) -> Measurement:  # fmt: skip
    """The measurement of one stored row.

    Raises:
        ValueError: when a value is not of its kind, or a successful one has no usable latency.
    """
    if not (type(point) is type(batch) is type(arm) is type(reason) is str):
        raise ValueError("point, batch, arm and reason must be text")
    outcome = _STATUSES.get(status) if isinstance(status, str) else None
    if outcome is None:
        raise ValueError(f"status {status!r} is none of: {', '.join(_STATUSES)}")
    if type(samples) is not int or samples < 0:
        raise ValueError(f"samples {samples!r} is not a count")
    if type(discarded) is not int or discarded < 0:
        raise ValueError(f"discarded {discarded!r} is not a count")
    latency, low, high = _latency(latency_us), _latency(low_us), _latency(high_us)
    if outcome is Status.OK and (latency is None or low is None or high is None):
        raise ValueError("a successful measurement needs a latency and its interval")
    off = _within(-inf, inf, error, "an error of {}")
    shared = _within(0, MOST_US, pass_us, "a cost of {} us a pass")
    return Measurement(
        point, batch, arm, outcome, latency, low, high, samples, off, reason, discarded, shared
    )


def check_sequences(batches: Iterable[str]) -> None:
    """Pass when `batches`, the batches of one table as words, have no more sequences than fit.

    Raises:
        ValueError: when they have.
    """
    total = 0
    for word in {*batches}:
        total += 1 + word.count(",")
        if "x" in word:
            total += sum(map(int, _COUNTED.findall(word)))
    if total > _MOST_SEQUENCES:
        raise ValueError(f"its batches have more than {_MOST_SEQUENCES} sequences together")


def _latency(value: object) -> float | None:
    return _within(LEAST_US, MOST_US, value, "a latency of {} us")


def _within(low: float, high: float, value: object, what: str) -> float | None:
    """`value`, which is a number from `low` to `high`, or nothing."""
    number = number_of(value)
    if number is not None and not low <= number <= high:
        raise ValueError(f"{what.format(number)} cannot be")
    return number


# --- writing


def format_table(table: Table) -> str:
    """`table` as text: the same text for the same measurements in whatever order."""
    key, device = table.key, table.device
    # Earlier versions read the first format, so that is written where it suffices.
    costs_a_pass = any(row.pass_us is not None for row in table.measurements)
    facts = [
        ("format", f"{_FORMAT} {2 if costs_a_pass else 1}"),
        ("gpu", key.gpu),
        ("arch", device.arch),
        *((name, str(getattr(device, name))) for name in _DEVICE_NUMBERS),
        ("driver", key.driver),
        ("model", key.model),
        ("heads", str(key.heads)),
        ("kv_layout", key.kv_layout),
        ("protocol", key.protocol),
        ("measured_at", table.measured_at),
        # A file that was cut short, or merged by hand, no longer has as many.
        (_ROWS, str(len(table.measurements))),
        *(("library", f"{name} {version}") for name, version in key.libraries),
        # A name each: earlier versions of nsa-tune pass over names that they do not know.
        *((f"{_LIMIT}{name}", str(value)) for name, value in sorted(table.limits.items())),
    ]
    ordered = sorted(table.measurements, key=lambda m: (m.point, _natural(m.batch), m.arm))
    if (ages := _ages(table, ordered)) is not None:
        facts.append((_AGES, ages))
    columns = _columns(with_pass=costs_a_pass)
    rows = ["\t".join(columns), *("\t".join(_cells(row, columns)) for row in ordered)]
    lines = [
        # No space is left at the end of a line without a value: editors would remove it.
        *(f"# {name} =" + (f" {_escaped(value)}" if value else "") for name, value in facts),
        *rows,
    ]
    place = [name for name, _ in facts].index(_ROWS) + 1
    lines.insert(place, f"# {_CONTENT} = {_digest(_joined(lines).encode())}")
    return _joined(lines)


def _ages(table: Table, rows: Sequence[Measurement]) -> str | None:
    """How long before the newest row each of `rows` was measured; None where all have one time."""
    if not table.times:
        return None
    ages = [_age_us(table.measured_at, table.time_of(row)) for row in rows]
    runs = (f"{age}x{len(list(same))}" for age, same in groupby(ages))
    return " ".join(runs) if any(ages) else None


def _age_us(newest: str, time: str) -> int:
    """Microseconds from `time` to `newest`; 0 where one of them is no time."""
    try:
        return max(_time(newest) - _time(time), timedelta()) // timedelta(microseconds=1)
    except (ValueError, TypeError, OverflowError):
        return 0


def _time(text: str) -> datetime:
    """The time in `text`, which names its zone.

    Raises:
        ValueError: when it does not.
    """
    time = datetime.fromisoformat(text)
    if time.utcoffset() is None:
        raise ValueError(f"{text!r} does not name its time zone")
    return time.astimezone(UTC)


def content_of(table: Table) -> str:
    """32 hex digits of the key, device, limits, measurements and their times: equal tables have
    equal ones."""
    line = _CONTENT_LINE.search(format_table(table).encode())
    assert line is not None, "what is written says what its content is"
    return line[1].decode()


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def format_row(measurement: Measurement) -> str:
    """The line of one measurement, without its newline."""
    return "\t".join(_cells(measurement, _columns(with_pass=True)))


def _columns(*, with_pass: bool) -> tuple[str, ...]:
    return (*_COLUMNS, _PASS) if with_pass else _COLUMNS


def _cells(row: Measurement, columns: Sequence[str]) -> Iterator[str]:
    for column in columns:
        value = getattr(row, column)
        if value is None or value == "":
            yield _NOTHING
        elif isinstance(value, float):
            yield repr(float(f"{value:.4g}")).removesuffix(".0")
        else:
            text = _escaped(str(value))
            yield "\\-" if text == _NOTHING else text


def _escaped(text: str) -> str:
    # A lone surrogate (an undecodable path in a reason) has no UTF-8 form.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _SPECIAL.sub(lambda m: "\\" + (_ESCAPES.get(m[0]) or f"u{ord(m[0]):04x}"), text)


def _natural(text: str) -> tuple[list[str | tuple[int, str]], str]:
    """A sort key that puts 512 before 1024: digits compare by value."""
    parts: list[str | tuple[int, str]] = list(re.split("([0-9]+)", text))
    for i, part in enumerate(parts[1::2]):
        digits = str(part).lstrip("0")
        parts[2 * i + 1] = (len(digits), digits)
    return parts, text


# --- reading


def read_text(path: Path) -> Table:
    """The table in the text file `path`.

    Raises:
        StoreMissing: when there is no such file.
        StoreNewer: when a newer nsa-tune wrote it.
        StoreCorrupt: when it is no table, or damaged; names the line.
    """
    data = _bytes(path)
    lines = _lines(data, path)
    table = _read(_Head.of(lines, path), lines, path)
    # Last: what is wrong with a line says more.
    _check_content(data, path)
    return table


def _read(head: _Head, lines: Sequence[str], path: Path) -> Table:
    rows = lines[head.length : -1]
    if lines[-1] != "":
        raise _damage(path, len(lines), "the last line was cut short")
    columns = _columns(with_pass=head.version != "1")
    if rows[:1] != ["\t".join(columns)]:
        raise _damage(path, head.length + 1, f"the columns must be: {' '.join(columns)}")
    if len(rows) - 1 != head.number("rows"):
        raise _damage(
            path, len(lines), f"{len(rows) - 1} rows, where the head says {head.number('rows')}"
        )
    measurements: dict[tuple[str, str, str], Measurement] = {}
    for i, row in enumerate(rows[1:], head.length + 2):
        try:
            measurement = _parsed(row, len(columns))
        except ValueError as error:
            raise _damage(path, i, str(error)) from None
        place = (measurement.point, measurement.batch, measurement.arm)
        if measurements.setdefault(place, measurement) is not measurement:
            raise _damage(path, i, f"a second row for {' '.join(place)}")
    try:
        check_sequences(measurement.batch for measurement in measurements.values())
    except ValueError as error:
        raise StoreCorrupt(f"{path} is no table that can be used: {error}") from None
    try:
        times = head.times(list(measurements))
    except (ValueError, OverflowError) as error:
        raise _damage(path, head.facts[_AGES][0], f"ages: {error}") from None
    return replace(head.table(path), measurements=tuple(measurements.values()), times=times)


def read_key(path: Path) -> Key:
    """The key of the table in `path`, from its first lines alone.

    Raises:
        StoreError: as `read_text`.
    """
    return _Head.of(_lines(_bytes(path, key_only=True), path), path).key


def _bytes(path: Path, *, key_only: bool = False) -> bytes:
    """The whole file; with `key_only`, its first lines, those that begin with "#"."""
    try:
        with open_regular(path) as file:
            if key_only:
                head = takewhile(lambda line: line[:1] == b"#", lines_of(file, _LONGEST_LINE))
                return b"".join(head)
            data = read_whole(file, _MOST_BYTES)
    except FileNotFoundError:
        raise StoreMissing(f"there is no file {path}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except TooLong as error:
        raise StoreCorrupt(f"{path} is no table of nsa-tune: {error}") from None
    if data.count(b"\n") > 2 * MOST_ROWS:
        raise StoreCorrupt(f"{path} is no table of nsa-tune: it has more than {MOST_ROWS} rows")
    # A version control system may have changed the ends of the lines.
    return data.replace(b"\r\n", b"\n") if b"\r" in data else data


def _check_content(data: bytes, path: Path) -> None:
    """Pass when the content is what the file says, or it says nothing.

    Raises:
        StoreCorrupt: when it is not.
    """
    line = _CONTENT_LINE.search(data)
    if line is None:
        return
    if not data.endswith(b"\n"):
        raise _damage(path, data.count(b"\n") + 1, "the last line was cut short")
    content = _digest(data[: line.start()] + data[line.end() :])
    if line[1].decode("latin-1") != content:
        raise StoreCorrupt(
            f"{path} was changed since it was written: its content is {content}, not what its head "
            "says; get it anew, or remove the line '# content' if you changed it yourself"
        )


def _lines(data: bytes, path: Path) -> list[str]:
    try:
        # Not splitlines, which also splits at characters that a reason may hold.
        return data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _damage(path, line, "not UTF-8 text") from None


def _damage(path: Path, line: int, what: str) -> StoreCorrupt:
    return StoreCorrupt(f"{path}, line {line}: {what}")


@dataclass(frozen=True, slots=True)
class _Head:
    """The "# name = value" lines of a table."""

    path: Path
    facts: Mapping[str, tuple[int, str]]
    """Name to line number and value."""
    libraries: tuple[tuple[str, str], ...]
    length: int
    version: str
    """Of the format."""

    @classmethod
    def of(cls, lines: list[str], path: Path) -> _Head:
        """The head that begins `lines`; names that this version does not know are kept."""
        name, _, version = lines[0].removeprefix("# format = ").partition(" ")
        if name != _FORMAT:
            raise _damage(path, 1, f"not a table of nsa-tune, which begins '# format = {_FORMAT}'")
        if version not in _VERSIONS:
            raise StoreNewer(
                f"{path} has format {version!r}, which this nsa-tune does not read; upgrade it"
            )
        written = version
        facts: dict[str, tuple[int, str]] = {}
        libraries = []
        length = 0
        for length, line in enumerate(takewhile(lambda line: line.startswith("#"), lines), 1):
            name, separator, value = line.removeprefix("# ").partition(" =")
            try:
                value = _unescaped(value.removeprefix(" "))
            except ValueError as error:
                raise _damage(path, length, str(error)) from None
            if not separator or (name in facts and name != "library"):
                raise _damage(path, length, "not a new '# name = value'")
            facts[name] = (length, value)
            if name == "library":
                distribution, _, version = value.partition(" ")
                libraries.append((distribution, version))
        return cls(path, facts, tuple(libraries), length, written)

    def text(self, name: str) -> str:
        if name not in self.facts:
            raise _damage(self.path, self.length, f"there is no line '# {name} = ...'")
        return self.facts[name][1]

    def number(self, name: str) -> int:
        """The value of `name`, a whole number from 0."""
        text = self.text(name)
        if not _COUNT.fullmatch(text):
            raise _damage(self.path, self.facts[name][0], f"{name} is {text!r}, not a number")
        return int(text)

    def table(self, path: Path) -> Table:
        """The table without its measurements."""
        device = Device(self.text("gpu"), self.text("arch"), *map(self.number, _DEVICE_NUMBERS))
        return Table(self.key, device, (), str(path), self.text("measured_at"), self.limits)

    def times(self, cells: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
        """When each row was measured that is older than the newest; `cells` are all, in order.

        Raises:
            ValueError: when the ages are not of so many rows, or no ages.
            OverflowError: when a time would be before the year 1.
        """
        if _AGES not in self.facts:
            return {}
        ages: list[int] = []
        for word in self.facts[_AGES][1].split(" "):
            match = _AGE.fullmatch(word)
            if match is None or len(ages) + int(match[2]) > len(cells):
                raise ValueError(f"{word[:40]!r} is no age of so many of the {len(cells)} rows")
            ages += [int(match[1])] * int(match[2])
        if len(ages) != len(cells):
            raise ValueError(f"{len(ages)} ages for {len(cells)} rows")
        newest = _time(self.text("measured_at"))
        return {
            cell: (newest - timedelta(microseconds=age)).isoformat(timespec="microseconds")
            for cell, age in zip(cells, ages, strict=True)
            if age
        }

    @property
    def limits(self) -> dict[str, int]:
        """What probes found."""
        names = [name for name in self.facts if name.startswith(_LIMIT)]
        return {name.removeprefix(_LIMIT): self.number(name) for name in names}

    @property
    def key(self) -> Key:
        """What the table is valid for."""
        return Key(
            gpu=self.text("gpu"),
            driver=self.text("driver"),
            libraries=self.libraries,
            model=self.text("model"),
            heads=self.number("heads"),
            kv_layout=self.text("kv_layout"),
            protocol=self.text("protocol"),
        )


def _parsed(row: str, width: int) -> Measurement:
    cells = row.split("\t")
    if len(cells) != width:
        raise ValueError(f"{len(cells)} cells, where a row has {width}")
    point, batch, arm, status, latency, low, high, samples, error, reason, *more = cells
    if not _COUNT.fullmatch(samples):
        raise ValueError(f"samples {samples!r} is not a count")
    return checked_measurement(
        _text(point), _text(batch), _text(arm), status,
        _float(latency), _float(low), _float(high), int(samples), _float(error), _text(reason),
        pass_us=_float(more[0]) if more else None,
    )  # fmt: skip


def _text(cell: str) -> str:
    return "" if cell == _NOTHING else _unescaped(cell)


def _float(cell: str) -> float | None:
    return None if cell == _NOTHING else float(cell)


def _unescaped(cell: str) -> str:
    return _ESCAPED.sub(_character, cell) if "\\" in cell else cell


def _character(escape: re.Match[str]) -> str:
    code, letter = escape.groups()
    if code:
        character = chr(int(code, 16))
        if "\ud800" <= character <= "\udfff":
            raise ValueError(f"{escape[0]} is half a character")
        return character
    if letter not in _UNESCAPES:
        raise ValueError(f"{escape[0]} is no escape")
    return _UNESCAPES[letter]
