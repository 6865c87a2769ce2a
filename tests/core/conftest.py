"""Settings of the property tests: no deadline (machines differ), few examples, the same ones on every CI run."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "spanwire",
    deadline=None,
    max_examples=100,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("spanwire")
