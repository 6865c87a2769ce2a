"""Jobs: calls that are answered later."""
