"""Whether this machine can be measured, and whether a table still holds on it."""
