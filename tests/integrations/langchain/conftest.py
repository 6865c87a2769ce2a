"""The standard suites run in a process of their own (test_standard.py), with pytest plugins that are off here."""

collect_ignore = ["standard"]
