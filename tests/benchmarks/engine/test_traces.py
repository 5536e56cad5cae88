"""Traces: what they share is the same tokens, what they do not share is not."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.replay import chains_of
from benchmarks.engine.synthesise import SLICES, main
from benchmarks.engine.traces import Prompts, Request, Segment, read_trace


def _tokens(count: int, seed: str) -> list[int]:
    random = Random(seed)
    return [random.randrange(10**6) for _ in range(count)]


def _written(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_mooncake_blocks_are_512_tokens(tmp_path: Path) -> None:
    path = _written(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [4, 5]},
        {"timestamp": 1, "input_length": 700, "output_length": 2, "hash_ids": [4, 6]},
        {"timestamp": 2, "input_length": 9000, "output_length": 2, "hash_ids": list(range(18))},
        {"timestamp": 3, "input_length": 512, "output_length": 0, "hash_ids": [5]},
        {"timestamp": 4, "input_length": 512, "output_length": 2, "hash_ids": [7]},
    )
    found = read_trace(path, most=3, longest=1000, out_tokens=16)

    assert [one.input_length for one in found] == [600, 700, 512]
    assert [one.output_length for one in found] == [16, 2, 1]
    prompts = Prompts(found, _tokens)
    first, second, third = (prompts.of(one, 1) for one in found)
    assert first[:512] == second[:512] and first[512:] != second[512:600]
    assert first[512:] == third[:88]


def test_only_what_was_warmed_stays_the_same_in_the_next_replay(tmp_path: Path) -> None:
    path = _written(
        tmp_path / "trace.jsonl",
        {"segments": [["head", 9]], "output_length": 1, "warm": True},
        {"segments": [["head", 9], ["turn", 5]], "output_length": 3, "session": 4},
    )
    warm, turn = read_trace(path, most=1, longest=99, out_tokens=16)

    assert (warm.warm, turn.warm, turn.session) == (True, False, "4")
    prompts = Prompts([warm, turn], _tokens)
    assert prompts.of(turn, 1)[:9] == prompts.of(turn, 2)[:9] == prompts.of(warm, 0)
    assert prompts.of(turn, 1)[9:] != prompts.of(turn, 2)[9:]


def test_a_line_of_no_known_format_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path / "trace.jsonl", {"ContextTokens": 5})
    with pytest.raises(ValueError, match="segments or hash_ids"):
        read_trace(path, most=1, longest=99, out_tokens=16)


def test_sessions_follow_each_other_and_others_stand_alone() -> None:
    def one(session: str) -> Request:
        return Request((Segment("a", 1),), 1, session)

    requests = [one("s"), one(""), one("s"), one("")]
    asked = [([i], i) for i in range(4)]
    assert chains_of(requests, asked) == [[([0], 0), ([2], 2)], [([1], 1)], [([3], 3)]]


@given(seed=st.integers(0, 10**6))
def test_slices_are_seeded_and_as_described(seed: int) -> None:
    for made in SLICES.values():
        assert list(made(seed)) == list(made(seed))
        assert list(made(seed)) != list(made(seed + 1))
    lengths = {
        name: [sum(count for _, count in line["segments"]) for line in made(seed)]
        for name, made in SLICES.items()
    }
    assert max(lengths["short"]) <= 2049
    assert min(lengths["long"]) >= 8192 and max(lengths["long"]) < 32768
    chat = list(SLICES["chat"](seed))
    warm = {tuple(map(tuple, line["segments"])) for line in chat if line.get("warm")}
    for line in chat:
        if not line.get("warm"):
            shared = tuple(map(tuple, line["segments"]))
            assert any(shared[: len(head)] == head for head in warm)
            assert line["segments"][-1][1] <= 512


def test_the_three_files_are_written(tmp_path: Path) -> None:
    main([str(tmp_path / "traces"), "--seed", "3"])
    for name in SLICES:
        found = read_trace(
            tmp_path / "traces" / f"{name}.jsonl", most=999, longest=40000, out_tokens=8
        )
        assert sum(not one.warm for one in found) >= 16
