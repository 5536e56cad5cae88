"""The commands, in folders by what they work on: this machine's device (`measure`), tables
(`results`), an engine's traffic (`traffic`), a database (`db`), many hosts (`fleet`).
"""
