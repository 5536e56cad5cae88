"""What the tests of replays draw."""

from __future__ import annotations

from hypothesis import strategies as st

from nsa_tune.autotune.workload.requests import TraceRequest

requests = st.lists(
    st.builds(
        TraceRequest,
        st.floats(0, 10),
        st.integers(1, 3000),
        st.integers(1, 40),
        st.lists(st.integers(0, 5), max_size=6).map(tuple),
    ),
    max_size=12,
)
"""Short traces, in no order; a few blocks are shared."""
