"""Decision point `indexer_layout`: how `next_n` queries a sequence reach the indexer's kernel.

`native` passes [batch, next_n]; `pairs` splits it into [batch * next_n / 2, 2]; `flatten` into
[batch * next_n, 1]. A layout that splits repeats the block table's rows, and reads a sequence's
keys once for each of its rows. The metadata and the repeated tables are computed once a pass for
all layers and are not in the time.
"""

from __future__ import annotations

from nsa_tune.backend.points.indexer_layout import batches, features
from nsa_tune.backend.points.indexer_layout.arms import ARMS, STEPS
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point, Question, case_in

INDEXER_LAYOUT = Point(
    name="indexer_layout",
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND}),
    arms=ARMS,
    questions=(
        Question(
            "indexer_layout",
            {name: (f"{name}/deep_gemm", f"{name}/torch") for name in STEPS},
        ),
    ),
    features=features.features,
    regimes_alike=2,
    grid=batches.grid,
    case=case_in("indexer_layout.case", "IndexerCase"),
    sample=batches.sample,
    corrected=True,
)
