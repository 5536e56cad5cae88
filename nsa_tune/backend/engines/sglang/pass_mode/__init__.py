"""How a prefill pass runs: in SGLang's own graph, or in one that leaves the host less to do."""
