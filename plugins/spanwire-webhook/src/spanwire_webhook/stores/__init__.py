"""Stores of jobs that several machines share. Each is loaded when its URL is used."""
