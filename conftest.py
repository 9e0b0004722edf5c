"""Settings of the tests of this repository."""

from hypothesis import settings

# A test fails for what is wrong, never for how long a busy machine takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
