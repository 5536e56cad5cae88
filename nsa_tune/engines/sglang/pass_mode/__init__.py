"""How a prefill pass runs: in SGLang's own graph, or in one that leaves the host less to do.

SGLang calls `hooks`. When an engine starts, `eligible` says what may be changed in it, graphs of
`whole_pass` are captured, and `start` has `calibration` measure the `times` of whole passes, or
reads those of an earlier start. For each prefill `steering` then chooses a `mode`: SGLang's own
graph, one of `whole_pass`, or the `rows` of decode graphs. All ranks go by the same (`ranks.py`).
"""
