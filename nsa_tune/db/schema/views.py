"""Views for whoever would rather ask a database directly (docs/reports.md names their columns).

They say only what the measurements say by themselves: guards, what lies between the measured
batches, and which arms make a choice are the reports' business.
"""

from __future__ import annotations

# The ceilings of a device (point "roofline") are measured one by one and leave no choice.
VIEWS = (
    """
    CREATE VIEW v_regret AS
    SELECT key_id, gpu, model, heads, kv_layout, point, batch, arm, latency_us, low_us, high_us,
        samples, first_value(arm) OVER fastest_first AS best_arm,
        first_value(latency_us) OVER fastest_first AS best_us,
        latency_us / first_value(latency_us) OVER fastest_first - 1 AS regret,
        row_number() OVER fastest_first AS place
    FROM newest WHERE status = 'ok' AND point <> 'roofline'
    WINDOW fastest_first AS (PARTITION BY key_id, point, batch ORDER BY latency_us, arm)
    """,
    # A batch with one arm has a winner without a runner-up.
    """
    CREATE VIEW v_winner AS
    SELECT one.key_id, one.gpu, one.model, one.heads, one.kv_layout, one.point, one.batch,
        one.arm, one.latency_us, two.arm AS runner_up, two.latency_us AS runner_up_us,
        two.latency_us / one.latency_us AS margin, one.high_us < two.low_us AS apart
    FROM v_regret AS one LEFT JOIN v_regret AS two
        ON two.key_id = one.key_id AND two.point = one.point AND two.batch = one.batch
        AND two.place = 2
    WHERE one.place = 1
    """,
    # "absent": a guard forbade the arm there, or a run has not come so far.
    """
    CREATE VIEW v_limits AS
    SELECT key_id, gpu, model, heads, kv_layout, point, arm, status AS kind, reason,
        count(*) AS batches, min(batch) AS example
    FROM newest WHERE status <> 'ok'
    GROUP BY key_id, point, arm, status, reason
    UNION ALL
    SELECT arms.key_id, arms.gpu, arms.model, arms.heads, arms.kv_layout, arms.point, arms.arm,
        'absent', '', count(*), min(batches.batch)
    FROM (SELECT DISTINCT key_id, gpu, model, heads, kv_layout, point, arm FROM newest
        WHERE point <> 'roofline') AS arms
    JOIN (SELECT DISTINCT key_id, point, batch FROM newest) AS batches
        ON batches.key_id = arms.key_id AND batches.point = arms.point
    LEFT JOIN (SELECT DISTINCT key_id, point, batch, arm FROM newest) AS there
        ON there.key_id = arms.key_id AND there.point = arms.point AND there.arm = arms.arm
        AND there.batch = batches.batch
    WHERE there.arm IS NULL
    GROUP BY arms.key_id, arms.point, arms.arm
    """,
    # Along batches of equal sequences: extends by their new tokens, the others by their sequences.
    # extend:PREFIX+NEW[xCOUNT], else MODE:nNEXT_N:CONTEXT[xCOUNT]; a comma means unequal ones.
    """
    CREATE VIEW v_crossover AS
    WITH split AS (
        SELECT *, substr(batch, 1, instr(batch, ':') - 1) AS mode,
            substr(batch, instr(batch, ':') + 1) || 'x1' AS rest
        FROM v_winner WHERE instr(batch, ',') = 0 AND instr(batch, '=') = 0
    ), counted AS (
        SELECT *, CAST(substr(rest, instr(rest, 'x') + 1) AS INTEGER) AS sequences,
            substr(rest, 1, instr(rest, 'x') - 1) AS word
        FROM split WHERE mode IN ('extend', 'decode', 'target_verify', 'draft_extend')
    ), placed AS (
        SELECT *,
            CASE mode WHEN 'extend' THEN CAST(substr(word, instr(word, '+') + 1) AS INTEGER)
                ELSE sequences END AS value,
            CASE mode WHEN 'extend'
                THEN 'sequences ' || sequences || ', prefix '
                    || substr(word, 1, instr(word, '+') - 1)
                ELSE 'next_n ' || substr(word, 2, instr(word, ':') - 2) || ', context '
                    || substr(word, instr(word, ':') + 1) END AS line
        FROM counted
    ), stepped AS (
        SELECT *, lag(arm) OVER along AS left_arm, lag(value) OVER along AS left_value
        FROM placed
        WINDOW along AS (PARTITION BY key_id, point, mode, line ORDER BY value)
    )
    SELECT key_id, gpu, model, heads, kv_layout, point, mode, line,
        CASE mode WHEN 'extend' THEN 'new tokens' ELSE 'sequences' END AS axis,
        left_arm, arm AS right_arm, left_value, value AS right_value
    FROM stepped WHERE left_arm <> arm
    """,
)

# v_winner and v_crossover read it by its name, so they go by the same times.
REGRET = """
    CREATE VIEW v_regret AS
    SELECT key_id, gpu, model, heads, kv_layout, point, batch, arm, latency_us, low_us, high_us,
        samples, first_value(arm) OVER fastest_first AS best_arm,
        first_value(latency_us) OVER fastest_first AS best_us,
        latency_us / first_value(latency_us) OVER fastest_first - 1 AS regret,
        row_number() OVER fastest_first AS place, pass_us, layers
    FROM (
        SELECT key_id, gpu, model, heads, kv_layout, point, batch, arm, samples, pass_us,
            latency_us + share AS latency_us, low_us + share AS low_us, high_us + share AS high_us,
            layers
        FROM (
            SELECT newest.*, layers, coalesce(pass_us / coalesce(layers, 1), 0) AS share
            FROM newest LEFT JOIN models ON models.name = newest.model
            WHERE status = 'ok' AND point <> 'roofline'
        )
    )
    WINDOW fastest_first AS (PARTITION BY key_id, point, batch ORDER BY latency_us, arm)
    """
"""v_regret by what an arm takes in a layer, its share of the cost of a pass among it."""

SPREAD = """
    CREATE VIEW v_spread AS
    SELECT key_id, gpu, driver, model, heads, kv_layout, run_id, point, batch, arm,
        count(*) AS units, min(latency_us) AS fastest_us, max(latency_us) AS slowest_us,
        max(latency_us) / min(latency_us) - 1 AS spread
    FROM unit_times JOIN runs ON runs.id = run_id JOIN keys ON keys.id = key_id
    GROUP BY run_id, point, batch, arm
    HAVING count(*) > 1
    """
"""How far equal devices are apart on what several of them measured in one run."""
