"""The service over HTTP: the web server, the addresses, and what each answers."""
