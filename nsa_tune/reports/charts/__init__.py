"""Charts as Vega-Lite specs in plain dicts, one module for each kind of chart.

A spec names its data sets; `rows` makes them from a report, `figures` puts both together, and
`pictures` draws them.
"""
