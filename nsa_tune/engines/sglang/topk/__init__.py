"""Selecting the keys of prefills by nsa-tune's own kernel, where it is faster than SGLang's."""
