"""Marks out of other libraries' hooks, for calls that go through a client which is not ours."""
