"""Stores that several machines share: PostgreSQL, and Redis or Valkey. Each is loaded when its URL is first opened."""
