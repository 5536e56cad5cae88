"""nsa-tune's plug-in measured in a real SGLang engine on one GPU host. docs/engine.md says how."""
