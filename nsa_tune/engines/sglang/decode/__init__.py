"""Which kernel attends in decode graphs over a bf16 pool: SGLang's fa3, or nsa-tune's."""
