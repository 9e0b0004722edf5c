"""What a step takes on a device.

Under ``serial`` timing attention reads the KV cache after the matrix products, under ``overlap`` at the
same time; a real device lies between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Timing = Literal["serial", "overlap"]
TIMINGS: Final[tuple[Timing, ...]] = get_args(Timing)


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """The constants of a step's time, and the size of the KV cache.

    >>> toy = DeviceProfile(
    ...     name="toy", overhead_seconds=1.0, seconds_per_token=0.5, weight_seconds=4.0,
    ...     seconds_per_context_token=0.25, num_blocks=100,
    ... )
    >>> toy.step_seconds("serial", tokens=2, context_tokens=8)  # 1 + max(0.5 * 2, 4) + 0.25 * 8
    7.0
    >>> toy.step_seconds("overlap", tokens=14, context_tokens=8)  # 1 + max(0.5 * 14, 4 + 0.25 * 8)
    8.0
    """

    name: str
    overhead_seconds: float
    """What every step costs, whatever it does."""
    seconds_per_token: float
    """The matrix products of one token."""
    weight_seconds: float
    """Reading the weights once."""
    seconds_per_context_token: float
    """Attention's reading of the KV cache of one token."""
    num_blocks: int
    """The blocks that requests can hold."""
    block_size: int = 16

    def step_seconds(self, timing: Timing, tokens: float, context_tokens: float) -> float:
        """The time of a step that computes ``tokens`` and whose requests hold ``context_tokens``."""
        return self.seconds(timing, 1, tokens, context_tokens)

    def seconds(self, timing: Timing, steps: float, tokens: float, context_tokens: float) -> float:
        """The least time of so many steps that together compute and read so much.

        The time of a step is convex, so no split of the work over the steps takes less.
        """
        compute = self.seconds_per_token * tokens
        weights = self.weight_seconds * steps
        attention = self.seconds_per_context_token * context_tokens
        if timing == "serial":
            return self.overhead_seconds * steps + max(compute, weights) + attention
        return self.overhead_seconds * steps + max(compute, weights + attention)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A dense decoder with grouped-query attention, in 16 bits."""

    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> float:
        """The weights, all of which each step reads."""
        return self.parameters * self.bytes_per_value

    @property
    def flops_per_token(self) -> float:
        """A multiplication and an addition per parameter."""
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """A key and a value per layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_value


@dataclass(frozen=True, kw_only=True)
class Device:
    """The data sheet of a device, and the shares of it that real kernels reach."""

    name: str
    peak_flops: float
    reached_flops: float
    bytes_per_second: float
    reached_bandwidth: float
    memory_bytes: float
    overhead_seconds: float
    usable_memory: float = 0.9
    activation_bytes: float = 3e9

    def profile(self, model: Model, block_size: int = 16) -> DeviceProfile:
        """The constants of a step of ``model`` on this device."""
        bandwidth = self.bytes_per_second * self.reached_bandwidth
        cache_bytes = self.memory_bytes * self.usable_memory - model.weight_bytes - self.activation_bytes
        return DeviceProfile(
            name=self.name,
            overhead_seconds=self.overhead_seconds,
            seconds_per_token=model.flops_per_token / (self.peak_flops * self.reached_flops),
            weight_seconds=model.weight_bytes / bandwidth,
            seconds_per_context_token=model.kv_bytes_per_token / bandwidth,
            num_blocks=int(cache_bytes // (model.kv_bytes_per_token * block_size)),
            block_size=block_size,
        )


LLAMA_8B: Final = Model(parameters=8.03e9, layers=32, kv_heads=8, head_size=128)
"""Llama 3.1 8B."""

# docs/explanation/device-profiles.md has the sources.
H100: Final = Device(
    name="h100",
    peak_flops=989e12,
    reached_flops=0.60,
    bytes_per_second=3.35e12,
    reached_bandwidth=0.80,
    memory_bytes=80e9,
    overhead_seconds=2e-3,
)
ASCEND_910B: Final = Device(
    name="ascend_910b",
    peak_flops=313e12,
    reached_flops=0.60,
    bytes_per_second=1.6e12,
    reached_bandwidth=0.75,
    memory_bytes=64e9,
    overhead_seconds=5e-3,
)

PROFILES: Final = {device.name: device.profile(LLAMA_8B) for device in (H100, ASCEND_910B)}
"""An 8B model in 16 bits on each device, by the device's name."""
