"""How long a batch takes on a virtual clock: any scheduler, any device, no hardware.

``python -m batchjob_testkit.simulator --help`` answers "Will it help my batch?". In Python,
:func:`simulation.simulate` runs a :class:`scenario.Scenario` on the engine that a backend makes:
:class:`fake_backend.FakeBackend` needs nothing, :class:`vllm_backend.VllmBackend` needs vLLM and runs its
real scheduler.
"""
