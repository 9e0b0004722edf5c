"""The profile ``crosshair``: Hypothesis asks CrossHair's solver for inputs instead of drawing them."""

from importlib.util import find_spec

from hypothesis import HealthCheck, settings

if find_spec("hypothesis_crosshair_provider"):
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    settings.register_profile(
        "crosshair",
        backend="crosshair",
        max_examples=25,
        deadline=None,
        database=None,
        suppress_health_check=slow,
    )
