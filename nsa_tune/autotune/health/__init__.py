"""`nsa-tune doctor` and `nsa-tune check`: is the machine fit, and does a table still hold?"""
