"""Modules that SGLang imports and a run never uses: small ones in place of large packages."""
