"""How a prefill pass runs: in SGLang's own graph, or in one that leaves the host less to do.

When an engine starts, `hooks` asks `eligible` what may be changed in it, captures the graphs of
`dense`, and has `calibration` measure `times` of whole passes. For each prefill `steering` then
chooses a way and runs it: in SGLang's own graph, in a dense one, or as `rows` of decode graphs.
`ranks` keeps all ranks to one way.
"""
