"""spanwire over WebSocket."""
