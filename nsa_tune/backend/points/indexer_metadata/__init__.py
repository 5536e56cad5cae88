"""Decision point `indexer_metadata`: which kernel computes the metadata of the paged logits.

The metadata says which SM scores which keys; it is computed once a pass for all layers. DeepGEMM's
kernel is one warp, has a limit of rows, and is compiled anew for every 32 rows. The Triton kernel
takes any number of rows and is compiled once. Both give the same bits. A row is a query token. An
extend has rows too, because an engine may score pages in prefill (V4 does).
"""

from __future__ import annotations

from nsa_tune.backend.points.indexer_metadata import batches, features
from nsa_tune.backend.points.indexer_metadata.arms import ARMS
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point, Question, case_in

INDEXER_METADATA = Point(
    name="indexer_metadata",
    modes=frozenset(Mode),
    arms=ARMS,
    questions=(Question("indexer_metadata", {arm.name: (arm.name,) for arm in ARMS}),),
    features=features.features,
    grid=batches.grid,
    case=case_in("indexer_metadata.case", "MetadataCase"),
    sample=batches.sample,
)
