"""Polynomials of a batch's sums, and the conditions under which they are positive."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from nsa_tune.backend.dispatch.polynomials import (
    Polynomial,
    added,
    is_positive,
    polynomial_of,
    scaled,
)
from nsa_tune.backend.dispatch.tracing import SymbolicBatch, Trace
from nsa_tune.backend.types.batch import Batch, Mode

Q, KV, N = "batch.q_tokens", "batch.kv_tokens", "batch.sequences"


def _symbols() -> SymbolicBatch:
    return SymbolicBatch(Trace(), Mode.EXTEND, 1, None, has_lens=False)


def _batch(new: int, prefix: int, sequences: int) -> Batch:
    return Batch.from_totals(
        mode="extend",
        sequences=sequences,
        q_tokens=sequences * new,
        kv_tokens=sequences * (prefix + new),
        max_kv=prefix + new,
    )


def test_sums_and_products_of_two_sums_are_polynomials() -> None:
    batch = _symbols()
    node = 2 * (batch.q_tokens + 3) * (batch.kv_tokens - 1) - batch.q_tokens / 4

    assert polynomial_of(node) == {(KV, Q): 2, (Q,): -2.25, (KV,): 6, (): -6}
    assert polynomial_of(-batch.sequences) == {(N,): -1}
    assert polynomial_of(7) == {(): 7}


def test_squares_quotients_and_truths_are_none() -> None:
    batch = _symbols()
    for node in (
        batch.q_tokens * batch.q_tokens,
        batch.pairs / batch.q_tokens,
        batch.q_tokens // 3,
        batch.q_tokens * batch.kv_tokens * batch.sequences,
        batch.captured,
    ):
        assert polynomial_of(node) is None


def test_a_sum_rounded_up_stands_for_itself_where_that_is_asked_for() -> None:
    batch = _symbols()
    waves = (batch.q_tokens + 65) // 66

    assert polynomial_of(waves) is None
    assert polynomial_of(2 * waves, quotients=True) == {(f"(({Q} + 65) // 66)",): 2}
    # This is 0 on some batches, where sums are at least 1.
    assert polynomial_of((batch.q_tokens + 64) // 66, quotients=True) is None


_factor = st.floats(-1e6, 1e6)
_names = st.sampled_from([(), (Q,), (KV,), (N,), (KV, Q), (N, Q)])


@example({(): 4.0, (Q,): -2.2250738585072014e-308}, [(1, 1, 1)])
@given(
    st.dictionaries(_names, _factor),
    st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=1, max_size=20),
)
def test_the_condition_holds_where_the_polynomial_is_positive(
    polynomial: Polynomial, shapes: list[tuple[int, int, int]]
) -> None:
    condition = is_positive(polynomial)
    for shape in shapes:
        batch = _batch(*shape)
        sums = {Q: batch.q_tokens, KV: batch.kv_tokens, N: batch.sequences, "": 1}
        parts = [
            factor * sums[(*names, "", "")[0]] * sums[(*names, "", "")[1]]
            for names, factor in polynomial.items()
        ]
        holds = condition if isinstance(condition, bool) else eval(condition, {"batch": batch})

        if abs(sum(parts)) > 1e-9 * sum(map(abs, parts)):
            assert holds == (sum(parts) > 0)


def test_one_sum_alone_is_compared_with_a_whole_number() -> None:
    assert is_positive({(Q,): 2.0, (): -39.0}) == f"{Q} >= 20"
    assert is_positive({(Q,): 2.0, (): -40.0}) == f"{Q} >= 21"
    assert is_positive({(Q,): -2.0, (): 40.0}) == f"{Q} < 20"


def test_what_is_the_same_for_all_batches_is_no_condition() -> None:
    assert is_positive({(Q,): 2.0, (): -1.0}) is True
    assert is_positive({(Q,): -2.0, (KV,): -1.0, (): 3.0}) is False
    assert is_positive(added({(Q,): 1.0}, scaled({(Q,): 1.0}, -1))) is False
