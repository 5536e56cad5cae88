"""A tuning run: spreads batches over the devices and stores every row as soon as it is measured."""
