"""Stores of jobs that several machines share."""
