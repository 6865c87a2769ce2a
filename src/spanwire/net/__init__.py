"""Connections of our own: dialling, TLS, HTTP/1.1. Imported by transports, never by ``import spanwire``."""
